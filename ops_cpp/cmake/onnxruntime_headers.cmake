# Finds the C headers of ONNX Runtime and sets HINA_ORT_HEADERS to their folder. They are never part of this repository.
# In this order, saying which way it went:
#   1. HINA_ORT_INCLUDE_DIR, an environment variable or a CMake variable
#   2. the system's (Debian: libonnxruntime-dev)
#   3. Debian's package, by the mirror that this machine has configured; headers only, into the build folder
#   4. the release archive of the ONNX Runtime project; headers only, into the build folder
# The headers' release does not limit the runtime's: the library asks for the lowest API version it needs.

set(ort_build_dir "${CMAKE_BINARY_DIR}/onnxruntime_headers")
set(ort_release 1.23.2)

# The folder among ARGN that holds headers of API version 18 or later (kMinimumOrtApi), or nothing.
function(hina_find_ort_header result)
  foreach(folder IN LISTS ARGN)
    unset(found CACHE)
    find_path(found onnxruntime_c_api.h HINTS "${folder}" NO_DEFAULT_PATH
              PATH_SUFFIXES include include/onnxruntime include/onnxruntime/core/session onnxruntime
                            onnxruntime/core/session)
    if(found)
      file(STRINGS "${found}/onnxruntime_c_api.h" version REGEX "^#define ORT_API_VERSION ")
      string(REGEX MATCH "[0-9]+" version "${version}")
      if(version GREATER_EQUAL 18)
        set(${result} "${found}" PARENT_SCOPE)
        unset(found CACHE)
        return()
      endif()
      message(STATUS "ONNX Runtime headers: not those in ${found}, whose API version is ${version} (18 is needed)")
    endif()
    unset(found CACHE)
  endforeach()
endfunction()

set(HINA_ORT_INCLUDE_DIR "$ENV{HINA_ORT_INCLUDE_DIR}" CACHE PATH "Folder with the headers of ONNX Runtime")
if(HINA_ORT_INCLUDE_DIR)
  hina_find_ort_header(HINA_ORT_HEADERS "${HINA_ORT_INCLUDE_DIR}")
  if(NOT HINA_ORT_HEADERS)
    message(FATAL_ERROR "HINA_ORT_INCLUDE_DIR is '${HINA_ORT_INCLUDE_DIR}' (set with -D, or when this build folder was "
                        "first configured), but no onnxruntime_c_api.h of ONNX Runtime 1.18 or later lies there")
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

# Suite and SHA-256 of its package. Stable trixie keeps its version, here that of amd64; elsewhere, and in forky, which
# moves, the checksum of the archive's signed index, which apt verifies, is the one that counts.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(trixie_sha256 14f7d959d5deacbcf1504830d4189f91fc67382b399ed9ae9d3aa9c4050ced08)
else()
  set(trixie_sha256 signed-index)
endif()
foreach(package IN ITEMS "trixie ${trixie_sha256}" "forky signed-index")
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
  file(ARCHIVE_EXTRACT INPUT "${archive}" DESTINATION "${ort_build_dir}/partial" PATTERNS "*/include/*")
  file(RENAME "${ort_build_dir}/partial" "${ort_build_dir}/release")  # whole or not at all
  file(REMOVE "${archive}")
  hina_find_ort_header(HINA_ORT_HEADERS "${ort_build_dir}/release/onnxruntime-linux-x64-${ort_release}")
  set(ort_way "the release archive of ${ort_release}")
endif()

message(STATUS "ONNX Runtime headers: from ${ort_way}")
