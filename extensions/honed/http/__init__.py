"""`honed-http`: the Open Inference Protocol (KServe v2) over HTTP, before the service (docs/http.md)."""
