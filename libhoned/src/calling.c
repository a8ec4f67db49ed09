/* Making the call: at once, patiently, or to be collected. */
#include "request.h"

enum { FIRST_PAUSE = 100, LONGEST_PAUSE = 2000 }; /* ms */

void request_ended(struct call *call)
{
    honed_request *request = (honed_request *)call;
    honed_service *service = request->service;
    request->failure = call->failure;
    frame_free(request->run);
    request->run = NULL;
    if (call->failure.code)
        tensors_free(&request->outputs);
    if (!request->collected)
        return;
    request->next_done = NULL;
    if (service->done_last)
        service->done_last->next_done = request;
    else
        service->done_first = request;
    service->done_last = request;
}

static bool all_known(const struct bindings *bindings)
{
    for (size_t i = 0; i < bindings->count; i++)
        if (bindings->of[i].buffer && !buffer_known(bindings->of[i].buffer))
            return false;
    return true;
}

static bool uses(const struct bindings *bindings, const honed_buffer *buffer)
{
    for (size_t i = 0; i < bindings->count; i++)
        if (bindings->of[i].buffer == buffer)
            return true;
    return false;
}

static void tell(honed_request *request, const struct bindings *bindings)
{
    for (size_t i = 0; i < bindings->count; i++)
        if (request->call.state == CALL_HELD && bindings->of[i].buffer && !buffer_known(bindings->of[i].buffer))
            buffer_tell(bindings->of[i].buffer);
}

void requests_told(honed_buffer *buffer)
{
    honed_service *service = buffer->service;
    struct call *call = service->calls;
    while (call) {
        honed_request *request = (honed_request *)call; /* only requests are held */
        struct call *next = call->next;
        if (call->state == CALL_HELD && (uses(&request->inputs, buffer) || uses(&request->wanted, buffer))) {
            if (buffer->telling.failure.code) {
                call->failure = buffer->telling.failure;
                call_end(service, call);
            } else if (all_known(&request->inputs) && all_known(&request->wanted)) {
                call_release(service, call);
            }
        }
        call = next;
    }
}

static honed_code begin(honed_request *request, bool collected)
{
    honed_service *service = request->service;
    struct frame *frame;
    bool hold;
    succeed(&request->failure);
    if (not_now(request))
        return request->failure.code;
    forget_done(service, request); /* made again before it was collected */
    request->collected = collected;
    tensors_free(&request->outputs);
    if (service_connect(service, &request->failure))
        return request->call.failure.code = request->failure.code;
    request->call.msgid = ++service->msgids;
    frame = message_of(request);
    if (!frame)
        return request->call.failure.code = request->failure.code;
    hold = !all_known(&request->inputs) || !all_known(&request->wanted);
    call_begin(service, &request->call, frame, moment_after(time_limit(request)), hold);
    tell(request, &request->inputs);
    tell(request, &request->wanted);
    return HONED_OK;
}

honed_code honed_infer(honed_request *request)
{
    honed_code code = begin(request, false);
    if (code)
        return code;
    while (under_way(&request->call))
        pump(request->service, NEVER);
    set_timer(request->service);
    return request->call.failure.code;
}

honed_code honed_infer_patiently(honed_request *request, int patience)
{
    int64_t end = moment_after(patience);
    int pause = FIRST_PAUSE;
    for (;;) {
        honed_code code = honed_infer(request);
        int left = milliseconds_until(end);
        if (!honed_code_passes(code) || (request->sequence && code == HONED_DISCONNECTED) || (left >= 0 && left <= pause))
            return code;
        rest(pause);
        pause = 2 * pause < LONGEST_PAUSE ? 2 * pause : LONGEST_PAUSE;
    }
}

honed_code honed_submit(honed_request *request)
{
    honed_code code = begin(request, true);
    set_timer(request->service);
    return code;
}

honed_request *honed_collect(honed_service *service, int timeout)
{
    int64_t end = moment_after(timeout);
    honed_request *request;
    while (!service->done_first && !service->closed) {
        pump(service, service->calls ? end : 0); /* without a call, at least whether the service has gone */
        if (!service->done_first && (!service->calls || (end != NEVER && now() >= end)))
            break;
    }
    request = service->done_first;
    if (request) {
        service->done_first = request->next_done;
        if (!service->done_first)
            service->done_last = NULL;
    }
    if (!service->closed)
        set_timer(service);
    return request;
}

void honed_request_cancel(honed_request *request)
{
    if (under_way(&request->call))
        call_cancel(request->service, &request->call, HONED_CANCELLED, "the request was cancelled");
    if (!request->service->closed)
        set_timer(request->service);
}
