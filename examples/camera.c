/*
 * Runs a model of honed on the frames of a GStreamer pipeline, without copying them to the service.
 *
 *   cc -O2 -o camera camera.c $(pkg-config --cflags --libs honed gstreamer-app-1.0)
 *   ./camera MODEL FRAMES [SOURCE]
 *
 * MODEL takes images, FP32 of shape [1, 3, height, width] from 0 to 1. SOURCE is a part of a pipeline, as v4l2src or
 * "filesrc location=x.mp4 ! decodebin"; without it there are test pictures. Prints the largest output of each frame.
 */
#include <gst/app/gstappsink.h>
#include <gst/gst.h>
#include <honed.h>
#include <stdio.h>
#include <stdlib.h>

static void need(int good, const char *why)
{
    if (!good) {
        fprintf(stderr, "camera: %s\n", why);
        exit(1);
    }
}

static GstAppSink *play(const char *source, int width, int height)
{
    char *text = g_strdup_printf("%s ! videoconvert ! videoscale ! video/x-raw,format=RGBP,width=%d,height=%d ! "
                                 "appsink name=frames max-buffers=1 drop=true sync=false",
                                 source, width, height);
    GError *error = NULL;
    GstElement *pipeline = gst_parse_launch(text, &error);
    need(!error, error ? error->message : "");
    gst_element_set_state(pipeline, GST_STATE_PLAYING);
    g_free(text);
    return GST_APP_SINK(gst_bin_get_by_name(GST_BIN(pipeline), "frames"));
}

static void fill(float *to, GstSample *sample, size_t count)
{
    GstMapInfo map;
    need(gst_buffer_map(gst_sample_get_buffer(sample), &map, GST_MAP_READ) && map.size >= count, "a frame cannot be read");
    for (size_t i = 0; i < count; i++)
        to[i] = (float)map.data[i] / 255;
    gst_buffer_unmap(gst_sample_get_buffer(sample), &map);
}

static void show_largest(const honed_tensor *output)
{
    const float *values = honed_tensor_data(output);
    int64_t best = 0, count = honed_tensor_bytes(output) / 4;
    for (int64_t i = 1; i < count; i++)
        best = values[i] > values[best] ? i : best;
    if (count && honed_tensor_type(output) == HONED_FP32)
        printf("%s[%lld] = %g\n", honed_tensor_name(output), (long long)best, (double)values[best]);
}

int main(int argc, char **argv)
{
    honed_model *model;
    honed_buffer *frame;
    need(argc >= 3, "usage: camera MODEL FRAMES [SOURCE]");
    gst_init(NULL, NULL);
    honed_service *service = honed_service_new(NULL);
    need(honed_describe(service, argv[1], &model) == HONED_OK, honed_service_error(service));
    need(honed_model_input_count(model) == 1, "the model takes something else than one image");
    const honed_tensor *image = honed_model_input(model, 0);
    const int64_t *sizes = honed_tensor_shape(image);
    need(honed_tensor_rank(image) == 4 && sizes[1] == 3 && sizes[2] > 0 && sizes[3] > 0 && sizes[3] % 4 == 0,
         "the model does not take an image of a fixed size, with a width that is a multiple of 4");
    int64_t shape[] = {1, 3, sizes[2], sizes[3]}; /* the first may be open */
    size_t bytes = (size_t)(3 * shape[2] * shape[3]) * sizeof(float);
    honed_request *request = honed_request_new(service, argv[1]);
    need(honed_buffer_new(service, bytes, &frame) == HONED_OK, honed_service_error(service));
    need(honed_request_input_shared(request, honed_tensor_name(image), HONED_FP32, shape, 4, frame, 0) == HONED_OK,
         honed_request_error(request));
    GstAppSink *frames = play(argc > 3 ? argv[3] : "videotestsrc", (int)shape[3], (int)shape[2]);
    for (int left = atoi(argv[2]); left > 0; left--) {
        GstSample *sample = gst_app_sink_pull_sample(frames);
        need(sample != NULL, "there are no more frames");
        fill(honed_buffer_data(frame), sample, bytes / sizeof(float));
        gst_sample_unref(sample);
        if (honed_infer_patiently(request, 5000) == HONED_OK) /* a service that is restarted is waited for */
            show_largest(honed_request_output(request, 0));
        else
            fprintf(stderr, "camera: a frame is left out: %s\n", honed_request_error(request));
    }
    honed_buffer_free(frame);
    honed_request_free(request);
    honed_model_free(model);
    honed_service_free(service);
}
