# Each target makes .venv and installs what it needs; nothing else has to be typed.
#   make demo                          the shipped recipe, on the CPU, offline after the install
#   make demo TORCH="torch==2.13.0"    with the build of torch that has CUDA (several GB)
#   make test PYTHON=python3.12        with a Python of your choice, when .venv is made
#   make demo ARGS="--run.seed 1 --run.folder runs/digits-1"
.PHONY: demo test check bench
.DEFAULT_GOAL := test

PYTHON ?=
TORCH ?=
ARGS ?=
export PYTHON TORCH
# The installer leaves compiling to the first import, which must then be kept.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
ALL := train,tensorboard,bench,dev

demo:
	@tools/install train
	$(BIN)/python -m stretto train recipes/digits.toml --resume auto $(ARGS)

test:
	@tools/install $(ALL)
	$(BIN)/python -m pytest $(ARGS)

check:
	@tools/install $(ALL)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench:
	@tools/install $(ALL)
	$(BIN)/python -m bench $(ARGS)
