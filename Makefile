# The first of these commands sets .venv up: two or three minutes, most of it to compile llama.cpp.

BIN := .venv/bin

.PHONY: demo test lint soak clean

demo: .venv/ready
	@$(BIN)/anaphora demo

test: .venv/ready
	@$(BIN)/pytest

lint: .venv/ready
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

# All tests with their full counts.
soak: .venv/ready
	@ANAPHORA_SOAK=1 $(BIN)/pytest

clean:
	@rm -rf .venv

.venv/ready: pyproject.toml scripts/setup
	@scripts/setup
	@touch $@
