/* The ModelInfer that a request is. */
#include "request.h"

static const size_t MOST_INLINE = (size_t)1 << 30;
enum { LONGEST_TIMEOUT = 24 * 3600 * 1000 }; /* ms; the service takes no longer one */

int time_limit(const honed_request *request)
{
    return request->timeout >= 0 ? request->timeout : request->service->timeout;
}

static void put_place(struct frame *frame, const struct binding *binding)
{
    put_text(frame, "parameters");
    put_map(frame, 3);
    put_text(frame, "shared_memory_region");
    put_text(frame, binding->buffer->name);
    put_text(frame, "shared_memory_offset");
    put_uint(frame, binding->offset);
    put_text(frame, "shared_memory_byte_size");
    put_uint(frame, binding->bytes);
}

static void put_inputs(struct frame *frame, const struct bindings *inputs)
{
    size_t sent = 0;
    put_text(frame, "inputs");
    put_array(frame, inputs->count);
    for (size_t i = 0; i < inputs->count; i++) {
        const struct binding *input = &inputs->of[i];
        sent += !input->buffer;
        put_map(frame, input->buffer ? 4 : 3);
        put_text(frame, "name");
        put_text(frame, input->name);
        put_text(frame, "datatype");
        put_text(frame, honed_type_name(input->type));
        put_text(frame, "shape");
        put_array(frame, input->rank);
        for (size_t d = 0; d < input->rank; d++)
            put_int(frame, input->shape[d]);
        if (input->buffer)
            put_place(frame, input);
    }
    put_text(frame, "raw_input_contents");
    put_array(frame, sent);
    for (size_t i = 0; i < inputs->count; i++)
        if (!inputs->of[i].buffer)
            put_bytes(frame, inputs->of[i].data, inputs->of[i].bytes);
}

static void put_wanted(struct frame *frame, const struct bindings *wanted)
{
    put_text(frame, "outputs");
    put_array(frame, wanted->count);
    for (size_t i = 0; i < wanted->count; i++) {
        put_map(frame, wanted->of[i].buffer ? 2 : 1);
        put_text(frame, "name");
        put_text(frame, wanted->of[i].name);
        if (wanted->of[i].buffer)
            put_place(frame, &wanted->of[i]);
    }
}

static void put_parameters(struct frame *frame, const honed_request *request)
{
    /* Without a limit the service's own longest: it takes a request that names none for one of 60 s. */
    int timeout = time_limit(request);
    int64_t limit = timeout < 0 || timeout > LONGEST_TIMEOUT ? LONGEST_TIMEOUT : timeout;
    bool start = request->flags & HONED_SEQUENCE_START, end = request->flags & HONED_SEQUENCE_END;
    bool last_token = request->flags & HONED_SEQUENCE_LAST_TOKEN;
    put_text(frame, "parameters");
    put_map(frame, (size_t)(1 + (request->priority != 0) + 1 + request->compiled + (request->sequence ? 3 + last_token : 0)));
    put_text(frame, "timeout");
    put_int(frame, limit ? limit * 1000 : 1);
    if (request->priority) {
        put_text(frame, "priority");
        put_int(frame, request->priority);
    }
    put_text(frame, "finite");
    put_bool(frame, request->finite);
    if (request->compiled) {
        put_text(frame, "compiled");
        put_bool(frame, true);
    }
    if (request->sequence) {
        put_text(frame, "sequence_id");
        put_uint(frame, request->sequence);
        put_text(frame, "sequence_start");
        put_bool(frame, start);
        put_text(frame, "sequence_end");
        put_bool(frame, end);
        if (last_token) {
            put_text(frame, "last_token");
            put_bool(frame, true);
        }
    }
}

struct frame *message_of(honed_request *request)
{
    struct frame *frame;
    size_t room = 1024;
    for (size_t i = 0; i < request->inputs.count; i++) {
        const struct binding *input = &request->inputs.of[i];
        if (!input->buffer && (input->bytes > MOST_INLINE || (room += input->bytes + 512) > MOST_INLINE)) {
            fail(&request->failure, HONED_RESOURCE_EXHAUSTED,
                 "the inputs are too large for a message; put them in a honed_buffer");
            return NULL;
        }
    }
    frame = frame_new(room);
    if (frame) {
        put_request(frame, request->call.msgid, "ModelInfer");
        put_map(frame, request->wanted.count ? 5 : 4);
        put_text(frame, "model_name");
        put_text(frame, request->model);
        put_parameters(frame, request);
        put_inputs(frame, &request->inputs);
        if (request->wanted.count)
            put_wanted(frame, &request->wanted);
    }
    if (!frame || frame->failed) {
        frame_free(frame);
        fail_memory(&request->failure);
        return NULL;
    }
    return frame;
}
