"""The service: socket, model store, worker processes and the command line. Never TVM, never a GPU context."""
