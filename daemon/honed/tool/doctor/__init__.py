"""Says what is right and wrong with this machine, and what to do about it.

`gather` reads files and asks child processes (`probe`), which may crash or hang; `readings` are the results;
`checks` turns readings into findings without any I/O.
"""
