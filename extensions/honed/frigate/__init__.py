"""`honed-frigate`: object detection for Frigate, by models that honed serves.

Frigate's detector of type `zmq` sends pictures over a ZeroMQ socket and accepts at most 20 detections for
each (docs/frigate.md).
"""
