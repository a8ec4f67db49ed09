.PHONY: help run test lint setup nodetests deb clean

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

run: setup ## show the main job: daemon, LightGlue, inference, check, profile
	@packaging/dev/demo

test: setup ## run all tests that this machine can run
	@.venv/bin/python -m pytest -n 2 --dist worksteal

lint: setup ## check style and types
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy daemon runtime tuner

setup: ## make .venv (installs missing Debian packages)
	@packaging/dev/setup

nodetests: setup ## run the 1,653 ONNX backend node tests
	@.venv/bin/python -m tests.tuner.backend.run --all

deb: ## build the Debian packages into dist/; ARCH=arm64 or amd64, SUITE=trixie
	@SUITE=$(SUITE) packaging/build-deb $(ARCH)

deb-check: ## look at the packages in dist/: lintian, the same bytes again, piuparts
	@packaging/check-deb

clean: ## remove .venv and the demo's state
	rm -rf .venv .run
