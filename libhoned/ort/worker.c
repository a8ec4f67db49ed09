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
    if (service) {
        close_descriptor(&service->socket);
        close_descriptor(&service->epoll);
        close_descriptor(&service->timer);
    }
    service = NULL;
    first = last = NULL;
    running = false;
    memset(&asked, 0, sizeof asked);
    pthread_cond_init(&asked, NULL);
}

/* ---- One question ---- */

static int open_file(const struct session *session)
{
    struct stat now_there;
    int descriptor;
    if (!session->path)
        return session->bytes;
    descriptor = open(session->path, O_RDONLY | O_CLOEXEC | O_NOCTTY);
    if (descriptor >= 0 && !fstat(descriptor, &now_there) && now_there.st_ino == session->file.st_ino &&
        now_there.st_dev == session->file.st_dev && now_there.st_size == session->file.st_size &&
        !memcmp(&now_there.st_mtim, &session->file.st_mtim, sizeof now_there.st_mtim))
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
        code = ask_form(service, model, &kind->shapes, question->reporting ? &question->report : NULL, &form);
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
    if (*line && write(STDERR_FILENO, line, strlen(line)) < 0)
        return;
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
