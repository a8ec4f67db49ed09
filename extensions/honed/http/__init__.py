"""`honed-http`: the Open Inference Protocol (KServe v2) over HTTP, in front of the service (docs/http.md)."""
