"""The shell around the core: it performs actions by workers and tells what came of them."""
