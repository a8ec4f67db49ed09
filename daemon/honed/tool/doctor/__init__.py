"""What is right and wrong with this machine, and what to do about it.

`gather` reads files and asks children (`probe`) that may crash or hang; `readings` is what they found;
`checks` turns readings into findings without any I/O.
"""
