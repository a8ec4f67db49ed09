"""The messages between honed's processes and clients (docs/protocol.md), without I/O.

`wire` has the messages, `decoder` parses their bytes, `peer` is one end of a connection, `methods` has a row
for each method with its parameters (`params`) and result (`results`, `service`), and `errors` has the errors.
Needs msgpack only.
"""
