/* Calls that wait for an answer, and their deadlines. */
#include <limits.h>
#include <sys/timerfd.h>
#include <time.h>

#include "transport.h"

int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

int64_t moment_after(int timeout)
{
    return timeout < 0 ? NEVER : now() + (int64_t)timeout * 1000000;
}

int milliseconds_until(int64_t moment)
{
    int64_t left;
    if (moment == NEVER)
        return -1;
    left = moment - now();
    if (left <= 0)
        return 0;
    left = (left + 999999) / 1000000;
    return left < INT_MAX ? (int)left : INT_MAX;
}

void rest(int milliseconds)
{
    nanosleep(&(struct timespec){milliseconds / 1000, (long)(milliseconds % 1000) * 1000000}, NULL);
}

int64_t earliest(const honed_service *service)
{
    int64_t moment = NEVER;
    for (const struct call *call = service->calls; call; call = call->next)
        if (call->deadline < moment)
            moment = call->deadline;
    return moment;
}

void set_timer(honed_service *service)
{
    int64_t moment = service->done_first ? 1 : earliest(service); /* 1: long past */
    struct itimerspec spec = {0};
    if (moment == service->armed || service->timer < 0)
        return;
    if (moment != NEVER) {
        spec.it_value.tv_sec = (time_t)(moment / 1000000000);
        spec.it_value.tv_nsec = (long)(moment % 1000000000);
    }
    timerfd_settime(service->timer, TFD_TIMER_ABSTIME, &spec, NULL);
    service->armed = moment;
}

bool under_way(const struct call *call)
{
    return call->state == CALL_HELD || call->state == CALL_SENT;
}

void call_end(honed_service *service, struct call *call)
{
    if (call->before)
        call->before->next = call->next;
    else
        service->calls = call->next;
    if (call->next)
        call->next->before = call->before;
    for (struct frame *frame = service->first; frame; frame = frame->next)
        if (frame->call == call)
            frame->call = NULL;
    frame_free(call->held);
    call->held = NULL;
    call->state = CALL_ENDED;
    if (call->ended)
        call->ended(call);
}

void call_cancel(honed_service *service, struct call *call, honed_code code, const char *why)
{
    uint32_t msgid = call->msgid;
    bool sent = call->state == CALL_SENT && !unqueue(service, call);
    fail(&call->failure, code, "%s", why);
    call_end(service, call);
    if (sent) {
        struct frame *frame = frame_new(64);
        if (frame) {
            put_notification(frame, "Cancel");
            put_map(frame, 1);
            put_text(frame, "msgid");
            put_uint(frame, msgid);
        }
        send_unanswered(service, frame);
    }
}

void expire(honed_service *service)
{
    int64_t moment = now();
    struct call *call = service->calls;
    while (call)
        if (call->deadline <= moment) {
            call_cancel(service, call, HONED_DEADLINE_EXCEEDED,
                        "the service did not answer in time; give a longer timeout");
            call = service->calls; /* the list may be another now */
        } else
            call = call->next;
}

void call_release(honed_service *service, struct call *call)
{
    struct frame *frame = call->held;
    call->held = NULL;
    call->state = CALL_SENT;
    frame->call = call;
    if (service->broken) /* it ends with the connection, in a moment */
        frame_free(frame);
    else
        queue(service, frame);
}

void call_begin(honed_service *service, struct call *call, struct frame *frame, int64_t deadline, bool hold)
{
    succeed(&call->failure);
    call->deadline = deadline;
    call->whole = false;
    call->state = CALL_HELD;
    call->held = frame;
    call->before = NULL;
    call->next = service->calls;
    if (call->next)
        call->next->before = call;
    service->calls = call;
    if (hold)
        return;
    call_release(service, call);
    flush(service);
}
