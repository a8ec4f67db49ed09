.PHONY: help run test test-slow test-all explore attack lint docs setup nodetests deb deb-check repo clean

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

run: setup ## show the main job: service, LightGlue, inference, check, profile
	@packaging/dev/demo

# Tests wait for processes now and then: one more than there are processors keeps them busy. A file's tests run
# in order in one process: they share services, and what one leaves to the next is the same every time.
JOBS ?= $(shell expr $$(nproc) + 1)
test: setup ## run the tests, the same every time: four minutes on two cores
	@.venv/bin/python -m pytest -n $(JOBS) --dist loadfile -m "not slow"

test-slow: setup ## run the slow ones: real searches, large models, packages, more examples: 40 minutes
	@.venv/bin/python -m pytest -n $(JOBS) --dist worksteal -m "slow or hypothesis" --hypothesis-profile=more

test-all: test test-slow ## run all tests

MINUTES ?= 5
explore: setup ## draw other examples for property tests for MINUTES (5); SEED=N repeats a run, JOBS=N processes
	@.venv/bin/python -m tests.explore --minutes $(MINUTES) --jobs $(JOBS) $(if $(SEED),--seed $(SEED))

attack: setup ## send made-up clients and files at a service for MINUTES (5); SEED=N repeats a run
	@.venv/bin/python -m tests.attack --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ATTACK)

lint: setup ## check style, types and spelling
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check .
	@.venv/bin/mypy daemon extensions runtime tuner benchmarks
	@git ls-files -z | xargs -0 .venv/bin/codespell

SITE ?= dist/site
docs: setup ## build all pages and the API reference into dist/site, for a browser; broken links are errors
	@sphinx-build -q -W --keep-going -b html -c docs -d $(SITE)/.doctrees . $(SITE)
	@echo "$(SITE)/docs/README.html"

setup: ## make .venv (installs missing Debian packages)
	@packaging/dev/setup

nodetests: setup ## run the 1,653 ONNX backend node tests
	@.venv/bin/python -m tests.tuner.backend.run --all

deb: ## build the Debian packages into dist/; ARCH=arm64 or amd64, SUITE=trixie
	@SUITE=$(SUITE) packaging/build-deb $(ARCH)

deb-check: ## look at the packages in dist/: lintian, the same bytes again, piuparts
	@packaging/check-deb

repo: ## make a signed apt repository of the packages in dist/, in dist/repo; URL=, HONED_REPO_KEY= a key of yours
	@python3 packaging/repository/build.py --key "$(HONED_REPO_KEY)" --url "$(URL)"

clean: ## remove .venv and the demo's state
	rm -rf .venv .run
