/* The message that a request is: ModelInfer at first, and ModelRun once calls like it were prepared. */
#include <stddef.h>
#include <string.h>

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
    put_text(frame, "inputs");
    put_array(frame, inputs->count);
    for (size_t i = 0; i < inputs->count; i++) {
        const struct binding *input = &inputs->of[i];
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
}

static void put_contents(struct frame *frame, const struct bindings *inputs)
{
    size_t sent = 0;
    for (size_t i = 0; i < inputs->count; i++)
        sent += !inputs->of[i].buffer;
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

static size_t put_options(struct frame *frame, const honed_request *request)
{
    bool start = request->flags & HONED_SEQUENCE_START, end = request->flags & HONED_SEQUENCE_END;
    bool last_token = request->flags & HONED_SEQUENCE_LAST_TOKEN;
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
    return (size_t)((request->priority != 0) + 1 + request->compiled + (request->sequence ? 3 + last_token : 0));
}

static struct likeness form_of(const honed_request *request)
{
    struct likeness form = {.packed = frame_new(512), .pairs = request->wanted.count ? 3 : 2};
    if (!form.packed)
        return form;
    put_text(form.packed, "model_name");
    put_text(form.packed, request->model);
    put_inputs(form.packed, &request->inputs);
    if (request->wanted.count)
        put_wanted(form.packed, &request->wanted);
    form.options_at = form.packed->size;
    form.options = put_options(form.packed, request);
    return form;
}

/* Without a limit the service's own longest: it takes a request that names none for one of 60 s. */
static void put_timeout(struct frame *frame, const honed_request *request)
{
    int timeout = time_limit(request);
    int64_t limit = timeout < 0 || timeout > LONGEST_TIMEOUT ? LONGEST_TIMEOUT : timeout;
    put_text(frame, "timeout");
    put_int(frame, limit ? limit * 1000 : 1);
}

/* ModelInfer, up to its data, or ModelPrepare, which has neither data nor timeout. */
static void put_form(struct frame *frame, const honed_request *request, bool whole)
{
    const struct likeness *form = &request->form;
    put_request(frame, whole ? request->call.msgid : request->preparing.msgid, whole ? "ModelInfer" : "ModelPrepare");
    put_map(frame, form->pairs + 1 + whole);
    put_packed(frame, form->packed->bytes, form->options_at);
    put_text(frame, "parameters");
    put_map(frame, form->options + whole);
    if (whole)
        put_timeout(frame, request);
    put_packed(frame, form->packed->bytes + form->options_at, form->packed->size - form->options_at);
}

void forget_form(honed_request *request)
{
    if (under_way(&request->preparing))
        call_cancel(request->service, &request->preparing, HONED_CANCELLED, "the request is another now");
    frame_free(request->form.packed);
    frame_free(request->run);
    request->form = (struct likeness){0};
    request->run = NULL;
    request->answered_on = request->number_on = 0;
    succeed(&request->preparing.failure);
}

/* Whether the service has answered a call like this one on this connection; else what it knows is forgotten. */
static bool is_known(honed_request *request, struct likeness form)
{
    const struct likeness *known = &request->form;
    bool like = known->packed && request->answered_on == request->service->connections &&
                known->packed->size == form.packed->size && known->options_at == form.options_at &&
                !memcmp(known->packed->bytes, form.packed->bytes, form.packed->size);
    if (like) {
        frame_free(form.packed);
    } else {
        forget_form(request);
        request->form = form;
    }
    return like;
}

/* Its number comes before the answer to the call that is sent next. */
static void prepare(honed_request *request)
{
    struct frame *frame = frame_new(request->form.packed->size + 128);
    request->preparing.take = take_number;
    request->preparing.msgid = ++request->service->msgids;
    if (frame)
        put_form(frame, request, false);
    if (frame && !frame->failed)
        call_begin(request->service, &request->preparing, frame, moment_after(time_limit(request)), false);
    else
        frame_free(frame);
}

void take_number(struct call *call, const struct message *message, const struct value *result)
{
    honed_request *request = (honed_request *)((char *)call - offsetof(honed_request, preparing));
    const struct value *number = find(message, result, "number");
    if (!number || number->kind != NUMBER) {
        fail_nonsense(&call->failure, "a prepared request without a number");
        return;
    }
    request->number = number->at;
    request->number_on = request->service->connections;
}

void take_refusal(struct call *call, const struct message *message, const struct value *error)
{
    honed_request *request = (honed_request *)call;
    struct frame *run = request->run, *whole;
    if (!run || !is_text(message, find(message, error, "code"), "NOT_PREPARED"))
        return;
    request->number_on = 0;
    request->run = NULL;
    request->call.msgid = ++request->service->msgids;
    whole = frame_new(request->form.packed->size + run->size + 128);
    if (whole) {
        put_form(whole, request, true);
        put_packed(whole, run->bytes + request->contents_at, run->size - request->contents_at);
    }
    frame_free(run);
    if (!whole || whole->failed) {
        frame_free(whole);
        fail_memory(&call->failure);
        return;
    }
    succeed(&call->failure);
    call->whole = false;
    call->state = CALL_HELD;
    call->held = whole;
}

struct frame *message_of(honed_request *request)
{
    struct frame *frame = NULL;
    struct likeness form;
    size_t room = 1024;
    bool known, numbered;
    for (size_t i = 0; i < request->inputs.count; i++) {
        const struct binding *input = &request->inputs.of[i];
        if (!input->buffer && (input->bytes > MOST_INLINE || (room += input->bytes + 512) > MOST_INLINE)) {
            fail(&request->failure, HONED_RESOURCE_EXHAUSTED,
                 "the inputs are too large for a message; put them in a honed_buffer");
            return NULL;
        }
    }
    frame_free(request->run);
    request->run = NULL;
    form = form_of(request);
    if (form.packed && !form.packed->failed) {
        known = is_known(request, form);
        numbered = known && request->number_on == request->service->connections;
        if (known && !numbered && !under_way(&request->preparing) && !request->preparing.failure.code)
            prepare(request);
        frame = frame_new(room);
        if (frame && numbered) {
            put_request(frame, request->call.msgid, "ModelRun");
            put_map(frame, 3);
            put_text(frame, "number");
            put_uint(frame, request->number);
            put_timeout(frame, request);
            request->contents_at = frame->size;
        } else if (frame) {
            put_form(frame, request, true);
        }
        if (frame)
            put_contents(frame, &request->inputs);
        if (frame && numbered && !frame->failed) {
            request->run = frame;
            frame_keep(frame);
        }
    } else {
        frame_free(form.packed);
    }
    if (!frame || frame->failed) {
        frame_free(frame);
        fail_memory(&request->failure);
        return NULL;
    }
    return frame;
}
