/* ModelForm. */
#include "asking.h"

#include <string.h>

struct asking {
    struct call call;
    struct form *form;
};

static void take_form(struct call *call, const struct message *message, const struct value *result)
{
    struct form *form = ((struct asking *)call)->form;
    const struct value *verified = find(message, result, "verified"), *time = find(message, result, "time_us");
    const struct value *precision = find(message, result, "precision");
    copy_text(form->why, sizeof form->why, message, find(message, result, "why"));
    form->verified = verified && verified->kind == TRUTH && verified->at;
    form->half = !is_text(message, precision, "fp32");
    if (!verified || verified->kind != TRUTH)
        fail_nonsense(&call->failure, "neither verified nor not");
    else if (!form->verified)
        form->time_us = 0;
    else if (!time || time->kind != NUMBER || time->at > (uint64_t)1 << 42)
        fail_nonsense(&call->failure, "a compiled form without a time");
    else
        form->time_us = (int64_t)time->at;
}

static void put_named(struct frame *frame, const char *name, uint64_t number)
{
    put_text(frame, name);
    put_uint(frame, number);
}

static void put_report(struct frame *frame, const struct report *report)
{
    put_text(frame, "report");
    put_map(frame, 7);
    put_text(frame, "app");
    put_text(frame, report->app);
    put_text(frame, "state");
    put_text(frame, report->state);
    put_text(frame, "why");
    put_text(frame, report->why);
    put_named(frame, "own_us", (uint64_t)report->own_us);
    put_named(frame, "routed_us", (uint64_t)report->routed_us);
    put_named(frame, "own_runs", report->own_runs);
    put_named(frame, "routed_runs", report->routed_runs);
}

honed_code ask_form(honed_service *service, const char *model, const struct shapes *shapes, const struct report *report,
                    struct form *form)
{
    struct asking asking = {.call = {.take = take_form, .msgid = ++service->msgids}, .form = form};
    struct frame *frame = frame_new(512);
    *form = (struct form){0};
    if (frame) {
        put_request(frame, asking.call.msgid, "ModelForm");
        put_map(frame, report ? 3 : 2);
        put_text(frame, "name");
        put_text(frame, model);
        put_shapes(frame, shapes, true);
        if (report)
            put_report(frame, report);
    }
    return ask(service, &asking.call, frame);
}
