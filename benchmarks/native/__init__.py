"""Programs in other languages than Python, alone and beside honed by its preload library."""
