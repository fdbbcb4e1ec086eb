# Finds the C headers of ONNX Runtime and sets HINA_ORT_HEADERS to their folder. They are never part of this repository.
# In this order, saying which way it went:
#   1. HINA_ORT_INCLUDE_DIR, an environment variable or a CMake variable
#   2. the system's (Debian: libonnxruntime-dev)
#   3. Debian's package, by the mirror that this machine has configured; headers only, into the build folder
#   4. the release archive of the ONNX Runtime project; headers only, into the build folder
# The headers' release does not limit the runtime's: the library asks for the lowest API version it needs.

set(ort_build_dir "${CMAKE_BINARY_DIR}/onnxruntime_headers")
set(ort_release 1.23.2)

function(hina_find_ort_header result)
  unset(found CACHE)
  find_path(found onnxruntime_c_api.h HINTS ${ARGN} NO_DEFAULT_PATH
            PATH_SUFFIXES include include/onnxruntime onnxruntime onnxruntime/core/session)
  if(found)
    set(${result} "${found}" PARENT_SCOPE)
  endif()
  unset(found CACHE)
endfunction()

if(NOT HINA_ORT_INCLUDE_DIR AND DEFINED ENV{HINA_ORT_INCLUDE_DIR})
  set(HINA_ORT_INCLUDE_DIR "$ENV{HINA_ORT_INCLUDE_DIR}")
endif()
if(HINA_ORT_INCLUDE_DIR)
  hina_find_ort_header(HINA_ORT_HEADERS "${HINA_ORT_INCLUDE_DIR}")
  if(NOT HINA_ORT_HEADERS)
    message(FATAL_ERROR "HINA_ORT_INCLUDE_DIR is ${HINA_ORT_INCLUDE_DIR}, but no onnxruntime_c_api.h lies there")
  endif()
  set(ort_way "HINA_ORT_INCLUDE_DIR")
endif()

if(NOT HINA_ORT_HEADERS)
  hina_find_ort_header(HINA_ORT_HEADERS /usr/include /usr/local/include)
  set(ort_way "the system")
endif()

if(NOT HINA_ORT_HEADERS)
  hina_find_ort_header(HINA_ORT_HEADERS "${ort_build_dir}/debian/usr" "${ort_build_dir}/release/onnxruntime-linux-x64-${ort_release}")
  set(ort_way "an earlier configuration of this build folder")
endif()

# Suite and SHA-256 of its package. Stable trixie keeps its version; forky moves, so there the checksum of the archive's
# signed index, which apt verifies, is the one that counts.
foreach(package IN ITEMS "trixie 14f7d959d5deacbcf1504830d4189f91fc67382b399ed9ae9d3aa9c4050ced08" "forky signed-index")
  if(HINA_ORT_HEADERS)
    break()
  endif()
  separate_arguments(package)
  list(GET package 0 suite)
  list(GET package 1 sha256)
  execute_process(
    COMMAND bash "${CMAKE_CURRENT_LIST_DIR}/debian_headers.sh" ${suite} ${sha256} "${ort_build_dir}/debian"
    RESULT_VARIABLE failed ERROR_VARIABLE why ERROR_STRIP_TRAILING_WHITESPACE)
  if(failed)
    message(STATUS "ONNX Runtime headers: not from Debian ${suite}: ${why}")
  else()
    hina_find_ort_header(HINA_ORT_HEADERS "${ort_build_dir}/debian/usr")
    set(ort_way "Debian ${suite}, package libonnxruntime-dev")
  endif()
endforeach()

if(NOT HINA_ORT_HEADERS)
  set(archive "${ort_build_dir}/onnxruntime-linux-x64-${ort_release}.tgz")
  file(DOWNLOAD "https://github.com/microsoft/onnxruntime/releases/download/v${ort_release}/onnxruntime-linux-x64-${ort_release}.tgz"
       "${archive}" STATUS status INACTIVITY_TIMEOUT 60
       EXPECTED_HASH SHA256=1fa4dcaef22f6f7d5cd81b28c2800414350c10116f5fdd46a2160082551c5f9b)
  list(GET status 0 failed)
  if(failed)
    list(GET status 1 why)
    message(FATAL_ERROR "ONNX Runtime headers: not from the release archive either: ${why}. Install libonnxruntime-dev, "
                        "or set HINA_ORT_INCLUDE_DIR to a folder that holds onnxruntime_c_api.h")
  endif()
  file(ARCHIVE_EXTRACT INPUT "${archive}" DESTINATION "${ort_build_dir}/release" PATTERNS "*/include/*")
  file(REMOVE "${archive}")
  hina_find_ort_header(HINA_ORT_HEADERS "${ort_build_dir}/release/onnxruntime-linux-x64-${ort_release}")
  set(ort_way "the release archive of ${ort_release}")
endif()

message(STATUS "ONNX Runtime headers: from ${ort_way}")
