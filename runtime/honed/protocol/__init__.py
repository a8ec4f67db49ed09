"""What honed's processes and clients say to one another (docs/protocol.md), without I/O.

`wire` has the messages, `decoder` makes them of bytes, `peer` is one end of a connection, `methods` has a row
for each method with its parameters (`params`) and result (`results`, `service`), `errors` what goes wrong.
Needs msgpack only.
"""
