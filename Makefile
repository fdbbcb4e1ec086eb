# Everything that the README names. Two virtual environments are made as needed (they need different releases of
# transformers): .venv for development and torch dynamo exports, .venv-optimum for optimum-onnx exports.

PYTHON ?= python3
DEV := .venv
OPTIMUM := .venv-optimum
BUILD := build/release
CXX_SOURCES = $(shell find ops_cpp tests -name '*.cc' -o -name '*.h')

define TORCH_HINT
error: the packages of the environment could not be installed (see above).
The environments pin CPU builds of torch (2.13.0+cpu), so that no CUDA build is ever downloaded. If it is torch that
was not found, set PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS to an index or folder that has CPU builds of torch.
endef
export TORCH_HINT

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.DELETE_ON_ERROR:
.PHONY: library setup demo test test-all corpus lint format bench wheel clean help

library: $(BUILD)/build.ninja ## compile the library into hina_ort/_lib (the default; quick when nothing changed)
	@$(DEV)/bin/cmake --build $(BUILD)
	@$(DEV)/bin/cmake --install $(BUILD) --prefix . | sed -n 's/^-- Installing/-- installed/p'

setup: library $(OPTIMUM)/.installed ## make both environments and the library

demo: library $(OPTIMUM)/.installed ## export a small Qwen3-MoE, fuse it, compare tokens, memory and speed
	$(OPTIMUM)/bin/python -m models.qwen3_moe.demo

test: library $(OPTIMUM)/.installed ## quick tests, in both environments
	$(DEV)/bin/python -m pytest -m "not optimum and not slow"
	$(OPTIMUM)/bin/python -m pytest -m "optimum and not slow"

test-all: library $(OPTIMUM)/.installed ## all tests, the slow ones too
	$(DEV)/bin/python -m pytest -m "not optimum"
	$(OPTIMUM)/bin/python -m pytest -m optimum

corpus: library $(OPTIMUM)/.installed ## export every architecture with every exporter, convert it and judge the result (half an hour)
	$(DEV)/bin/python -m models.corpus

lint: $(DEV)/.installed ## ruff, mypy and clang-format; changes nothing
	$(DEV)/bin/ruff check .
	$(DEV)/bin/ruff format --check .
	$(DEV)/bin/mypy
	$(DEV)/bin/clang-format --dry-run -Werror $(CXX_SOURCES)

format: $(DEV)/.installed ## let ruff and clang-format rewrite the sources
	$(DEV)/bin/ruff check --fix .
	$(DEV)/bin/ruff format .
	$(DEV)/bin/clang-format -i $(CXX_SOURCES)

bench: library ## time layers of well-known models against other runtimes and write docs/performance.md (forty minutes)
	$(DEV)/bin/python -m docs.generate_performance

wheel: $(DEV)/.installed ## build the wheel into dist/
	$(DEV)/bin/python -m build --wheel

clean: ## remove build output; the environments stay
	rm -rf build dist hina_ort/_lib

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

$(BUILD)/build.ninja: $(DEV)/.installed
	$(DEV)/bin/cmake -S . -B $(BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(DEV)/bin/ninja) \
	    -DCMAKE_BUILD_TYPE=Release -DCMAKE_EXPORT_COMPILE_COMMANDS=ON
	@touch $@

$(DEV)/.installed: EXTRAS := dynamo,dev
$(DEV)/.installed: environments/dynamo.txt
$(OPTIMUM)/.installed: EXTRAS := optimum,test
$(OPTIMUM)/.installed: environments/optimum.txt

# The project is installed as a link to this folder; its library is the one that `make library` builds.
$(DEV)/.installed $(OPTIMUM)/.installed: pyproject.toml environments/make_venv.sh
	@PYTHON=$(PYTHON) environments/make_venv.sh $(@D)
	@echo "installing the packages of $(@D) (a few minutes the first time)"
	@$(@D)/bin/python -m pip install --quiet --no-compile --editable '.[$(EXTRAS)]' --config-settings=wheel.cmake=false \
	    --constraint $(filter environments/%.txt,$^) || { echo "$$TORCH_HINT" >&2; exit 1; }
	@touch $@
