/* The thread that hands files to the service, and asks it for compiled forms. It starts with the first question. */
#include "ort.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "../src/transport.h"

enum { BRING_TIMEOUT = 600000, ASK_TIMEOUT = 10000, NICE = 10 }; /* ms */

struct report {
    const char *app, *state, *why;
    int64_t own_us, routed_us;
    uint64_t own_runs, routed_runs;
};

/* What the service says of the compiled form for a kind. */
struct form {
    bool verified, half;
    int64_t time_us;
    char why[WHY_BYTES];
};

struct question {
    struct question *next;
    struct session *session;
    struct kept_kind *kind;
    struct report report;
    char why[WHY_BYTES];
    bool reporting;
};

static struct question *first, *last;
static pthread_cond_t asked = PTHREAD_COND_INITIALIZER;
static bool running;
static honed_service *service;

void worker_forget(void)
{
    service_forget(service);
    service = NULL;
    first = last = NULL;
    running = false;
    memset(&asked, 0, sizeof asked);
    pthread_cond_init(&asked, NULL);
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

static void put_named(struct frame *frame, const char *name, const char *text)
{
    put_text(frame, name);
    put_text(frame, text);
}

static void put_number(struct frame *frame, const char *name, uint64_t number)
{
    put_text(frame, name);
    put_uint(frame, number);
}

static void put_report(struct frame *frame, const struct report *report)
{
    put_text(frame, "report");
    put_map(frame, 7);
    put_named(frame, "app", report->app);
    put_named(frame, "state", report->state);
    put_named(frame, "why", report->why);
    put_number(frame, "own_us", (uint64_t)report->own_us);
    put_number(frame, "routed_us", (uint64_t)report->routed_us);
    put_number(frame, "own_runs", report->own_runs);
    put_number(frame, "routed_runs", report->routed_runs);
}

/* `report` may be NULL. */
static honed_code ask_form(const char *model, const struct shapes *shapes, const struct report *report, struct form *form)
{
    struct asking asking = {.call = {.take = take_form, .msgid = ++service->msgids}, .form = form};
    struct frame *frame = frame_new(512);
    *form = (struct form){0};
    if (frame) {
        put_request(frame, asking.call.msgid, "ModelForm");
        put_map(frame, report ? 3 : 2);
        put_named(frame, "name", model);
        put_shapes(frame, shapes, true);
        if (report)
            put_report(frame, report);
    }
    return ask(service, &asking.call, frame);
}

/* ---- One question ---- */

static int open_file(const struct session *session)
{
    struct stat now_there;
    int descriptor;
    if (!session->path)
        return session->bytes;
    descriptor = open(session->path, O_RDONLY | O_CLOEXEC | O_NOCTTY);
    if (descriptor >= 0 && !fstat(descriptor, &now_there) && is_same_file(&now_there, &session->file))
        return descriptor;
    close_descriptor(&descriptor); /* the session was made of what is there no more */
    return -1;
}

/* Whether trying again is of no use. */
static bool is_final(honed_code code)
{
    return code == HONED_INVALID_ARGUMENT || code == HONED_FAILED_PRECONDITION || code == HONED_UNIMPLEMENTED;
}

static honed_code hand_over(struct session *session, const struct kept_kind *kind, char *model)
{
    const char *name = session->path ? name_of(session->path) : "model.onnx";
    int descriptor = open_file(session), folder = session->path ? open_folder_of(session->path) : -1;
    honed_code code = HONED_FAILED_PRECONDITION;
    if (descriptor >= 0) {
        struct bring_options options = {.precision = settings.half ? "auto" : "fp32", .shapes = &kind->shapes};
        honed_service_timeout(service, BRING_TIMEOUT);
        code = bring(service, descriptor, name, folder, &options, model);
    } else {
        fail(&service->failure, code, "the model's file has changed since the app opened it");
    }
    close_descriptor(&folder);
    if (session->path)
        close_descriptor(&descriptor);
    return code;
}

/* Runs beside the app's threads; what it reads of the session and the kind stays while it is asked. */
static void answer(struct question *question)
{
    struct session *session = question->session;
    struct kept_kind *kind = question->kind;
    struct form form = {0};
    struct route before;
    char model[MODEL_NAME_BYTES] = "", line[LINE_BYTES];
    bool refused, is_new = false;
    honed_code code = HONED_OK;

    enter();
    struct session *like = session_like(session);
    refused = session->refused || session->released;
    memcpy(model, *session->model || !like ? session->model : like->model, sizeof model);
    leave();

    if (!refused && !service && !(service = honed_service_new(NULL)))
        refused = true;
    if (!refused && !*model)
        is_new = !(code = hand_over(session, kind, model));
    if (!refused && !code) {
        honed_service_timeout(service, ASK_TIMEOUT);
        code = ask_form(model, &kind->shapes, question->reporting ? &question->report : NULL, &form);
    }

    enter();
    before = kind->route;
    if (!refused && code) {
        size_t size = strlen(service->failure.text);
        size = size < sizeof form.why ? size : sizeof form.why - 1;
        memcpy(form.why, service->failure.text, size);
        form.why[size] = 0;
        session->refused = !is_new && !*session->model && is_final(code);
    }
    if (!code || is_new)
        memcpy(session->model, model, sizeof model);
    if (code == HONED_NOT_FOUND)
        *session->model = 0;
    if (strcmp(kind->why, form.why))
        before.why = WHY_NONE; /* to be said */
    if (!refused)
        memcpy(kind->why, form.why, sizeof kind->why);
    if (session->bytes >= 0 && (session->refused || (!code && *session->model)))
        close_descriptor(&session->bytes); /* which the service has now, or does not want */
    if (!code && form.verified)
        route_known(&kind->route, now(), form.time_us * 1000, form.half);
    else
        route_unknown(&kind->route, now());
    session->rest_until = 0;
    say_changes(session, kind, &before, line);
    session_drop(session);
    leave();
    say(line);
}

/* ---- The thread ---- */

static void *work(void *nothing)
{
    setpriority(PRIO_PROCESS, 0, NICE); /* of this thread alone, on Linux */
    for (;;) {
        struct question *question;
        enter();
        while (!first)
            wait_entered(&asked);
        question = first;
        first = question->next;
        leave();
        answer(question);
        free(question);
    }
    return nothing;
}

static bool start(void)
{
    pthread_attr_t attributes;
    sigset_t all, old;
    pthread_t thread;
    if (running)
        return true;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    running = !pthread_create(&thread, &attributes, work, NULL);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attributes);
    return running;
}

void worker_ask(struct session *session, struct kept_kind *kind, bool reporting)
{
    struct question *question = start() ? calloc(1, sizeof *question) : NULL;
    struct route *route = &kind->route;
    if (!question) {
        route_unknown(route, now());
        return;
    }
    question->session = session;
    question->kind = kind;
    question->reporting = reporting;
    if (reporting) {
        memcpy(question->why, kind->why, sizeof question->why);
        question->report = (struct report){
            .app = settings.app,
            .state = route_state_name(route->state),
            .why = route->why == WHY_SERVICE ? question->why : route_why_text(route->why),
            .own_us = row_median(&route->own) / 1000,
            .routed_us = route->routed_median / 1000,
            .own_runs = route->own_runs - kind->reported_own,
            .routed_runs = route->routed_runs - kind->reported_routed,
        };
        kind->reported_own = route->own_runs;
        kind->reported_routed = route->routed_runs;
    }
    session->references++;
    if (first)
        last->next = question;
    else
        first = question;
    last = question;
    pthread_cond_signal(&asked);
}
