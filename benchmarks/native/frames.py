"""Runs a model on frames by GStreamer's onnxinference: frames.py MODEL, in Debian 13's Python."""

import sys

import gi

gi.require_versions({"Gst": "1.0", "GstApp": "1.0", "GstAnalytics": "1.0"})
from gi.repository import Gst, GstAnalytics, GstApp  # noqa: E402, F401 - GstApp gives elements their methods
from turns import take_turns  # noqa: E402

SIDE = 160
Gst.init(None)
pipeline = Gst.parse_launch(
    f'appsrc name=source format=time caps="video/x-raw,format=RGB,width={SIDE},height={SIDE},framerate=30/1"'
    f" ! onnxinference model-file={sys.argv[1]} input-image-format=chw optimization-level=enable-all"
    " ! appsink name=sink sync=false"
)
source, sink = pipeline.get_by_name("source"), pipeline.get_by_name("sink")
pixels = bytes(i * 7919 % 251 for i in range(3 * SIDE * SIDE))
pipeline.set_state(Gst.State.PLAYING)


def infer() -> list[float]:
    """Push a frame, and return what the model makes of it."""
    frame = Gst.Buffer.new_wrapped(pixels)
    frame.pts = 0
    source.emit("push-buffer", frame)
    meta = GstAnalytics.buffer_get_tensor_meta(sink.emit("pull-sample").get_buffer())
    data = meta.get(0).data
    taken, mapped = data.map(Gst.MapFlags.READ)
    assert taken
    found = list(memoryview(mapped.data).cast("f")[:1000])
    data.unmap(mapped)
    return found


take_turns(infer)
