/* ModelBring and ModelForm. */
#include "asking.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void put_shapes(struct frame *frame, const struct shapes *shapes, bool scalars)
{
    size_t count = 0;
    for (size_t i = 0; i < shapes->count; i++)
        count += scalars || shapes->ranks[i];
    put_text(frame, "shapes");
    put_map(frame, count);
    for (size_t i = 0; i < shapes->count; i++) {
        if (!scalars && !shapes->ranks[i])
            continue;
        put_text(frame, shapes->names[i]);
        put_array(frame, shapes->ranks[i]);
        for (size_t d = 0; d < shapes->ranks[i]; d++)
            put_int(frame, shapes->sizes[i][d]);
    }
}

static void copy_text(char *into, size_t room, const struct message *message, const struct value *text)
{
    size_t size = plain_text(message, text) ? text->size : 0;
    if (size >= room)
        size = room - 1;
    if (size)
        memcpy(into, message->bytes + text->at, size);
    into[size] = 0;
}

/* ---- ModelBring ---- */

struct bringing {
    struct call call;
    size_t count;
    int descriptors[MOST_DESCRIPTORS];
    char *names[MOST_DESCRIPTORS];
    char digests[MOST_DESCRIPTORS][DIGEST_BYTES];
    char *missing[MOST_DESCRIPTORS]; /* external data that the service needs */
    size_t missing_count;
    char *model;
};

static void take_model(struct call *call, const struct message *message, const struct value *result)
{
    struct bringing *bringing = (struct bringing *)call;
    const struct value *name = find(message, result, "model_name");
    copy_text(bringing->model, MODEL_NAME_BYTES, message, name);
    if (!name || name->kind != TEXT || !*bringing->model || name->size >= MODEL_NAME_BYTES)
        fail_nonsense(&call->failure, "a model without a name");
}

static void take_missing(struct call *call, const struct message *message, const struct value *error)
{
    struct bringing *bringing = (struct bringing *)call;
    const struct value *names = find(message, error, "external_data");
    if (!is_text(message, find(message, error, "type"), "MissingFiles") || !names || names->kind != ARRAY)
        return;
    for (uint32_t i = 0; i < names->size && bringing->missing_count < MOST_DESCRIPTORS; i++) {
        const struct value *name = item(message, names, i);
        char *copied = plain_text(message, name) && name->size ? malloc(name->size + 1) : NULL;
        if (!copied)
            continue;
        copy_text(copied, name->size + 1, message, name);
        bringing->missing[bringing->missing_count++] = copied;
    }
}

static bool leads_out(const char *name)
{
    if (*name == '/')
        return true;
    for (const char *at = name; at; at = strchr(at, '/') ? strchr(at, '/') + 1 : NULL)
        if (!strncmp(at, "..", 2) && (!at[2] || at[2] == '/'))
            return true;
    return false;
}

static bool add_file(struct bringing *bringing, int descriptor, const char *name)
{
    if (descriptor < 0 || bringing->count == MOST_DESCRIPTORS)
        return false;
    bringing->descriptors[bringing->count] = descriptor;
    bringing->names[bringing->count] = strdup(name);
    return digest_file(descriptor, bringing->digests[bringing->count]) && bringing->names[bringing->count++];
}

/* False where a file is not there, or not to be sent. */
static bool add_missing(struct bringing *bringing, int folder)
{
    for (size_t i = 0; i < bringing->missing_count; i++) {
        const char *name = bringing->missing[i];
        int opened = folder < 0 || leads_out(name) ? -1 : openat(folder, name, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
        if (!add_file(bringing, opened, name)) {
            if (opened >= 0)
                close(opened);
            return false;
        }
    }
    return bringing->missing_count;
}

static void forget_missing(struct bringing *bringing)
{
    while (bringing->missing_count)
        free(bringing->missing[--bringing->missing_count]);
}

static honed_code send_files(honed_service *service, struct bringing *bringing, const struct shapes *shapes,
                             const char *precision)
{
    struct frame *frame = frame_new(1024);
    bringing->call = (struct call){.take = take_model, .refused = take_missing, .msgid = ++service->msgids};
    if (frame) {
        frame->descriptors = bringing->descriptors;
        frame->descriptor_count = bringing->count;
        put_request(frame, bringing->call.msgid, "ModelBring");
        put_map(frame, 3);
        put_text(frame, "files");
        put_array(frame, bringing->count);
        for (size_t i = 0; i < bringing->count; i++)
            put_text(frame, bringing->names[i]);
        put_text(frame, "sha256");
        put_array(frame, bringing->count);
        for (size_t i = 0; i < bringing->count; i++)
            put_text(frame, bringing->digests[i]);
        put_text(frame, "parameters");
        put_map(frame, 3);
        put_text(frame, "engine");
        put_text(frame, "opencl");
        put_text(frame, "precision");
        put_text(frame, precision);
        put_shapes(frame, shapes, false);
    }
    return ask(service, &bringing->call, frame);
}

honed_code bring(honed_service *service, int descriptor, const char *name, int folder, const struct shapes *shapes,
                 const char *precision, char *model)
{
    struct bringing *bringing = calloc(1, sizeof *bringing);
    honed_code code;
    if (!bringing)
        return fail_memory(&service->failure);
    bringing->model = model;
    if (!add_file(bringing, descriptor, name)) {
        code = fail(&service->failure, HONED_FAILED_PRECONDITION, "%s cannot be read", name);
    } else {
        code = send_files(service, bringing, shapes, precision);
        if (code && add_missing(bringing, folder)) {
            forget_missing(bringing);
            code = send_files(service, bringing, shapes, precision);
        }
    }
    forget_missing(bringing);
    for (size_t i = 0; i < MOST_DESCRIPTORS; i++) {
        free(bringing->names[i]);
        if (i && i < bringing->count)
            close(bringing->descriptors[i]);
    }
    free(bringing);
    return code;
}

/* ---- ModelForm ---- */

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
