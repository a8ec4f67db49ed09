/* The connection: how it is made, kept and ended, and what waits for it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <unistd.h>

#include "transport.h"

static const char system_socket[] = "/run/honed/honed.sock";
enum { USUAL_TIMEOUT = 60000, FIRST_PAUSE = 20, LONGEST_PAUSE = 500 }; /* ms */
enum { READS = 64 }; /* at most, of what came while nobody waited */

/* ---- Life ---- */

static char *default_path(void)
{
    const char *given = getenv("HONED_SOCKET"), *folder = getenv("XDG_RUNTIME_DIR");
    char *path;
    size_t room;
    if (given && *given)
        return strdup(given);
    if (!folder || !*folder || geteuid() == 0 || access(system_socket, F_OK) == 0)
        return strdup(system_socket);
    room = strlen(folder) + sizeof "/honed/honed.sock";
    path = malloc(room);
    if (path)
        snprintf(path, room, "%s/honed/honed.sock", folder);
    return path;
}

honed_service *honed_service_new(const char *path)
{
    honed_service *service = calloc(1, sizeof *service);
    if (!service)
        return NULL;
    service->references = 1;
    service->timeout = USUAL_TIMEOUT;
    service->socket = -1;
    service->armed = NEVER;
    service->path = path ? strdup(path) : default_path();
    service->epoll = epoll_create1(EPOLL_CLOEXEC);
    service->timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    if (message_init(&service->incoming) && service->path && service->epoll >= 0 && service->timer >= 0 &&
        watch(service, service->timer, EPOLLIN, EPOLL_CTL_ADD))
        return service;
    honed_service_free(service);
    return NULL;
}

static void free_service(honed_service *service)
{
    message_free(&service->incoming);
    free(service->path);
    free(service);
}

void honed_service_free(honed_service *service)
{
    if (!service)
        return;
    service->closed = true;
    if (service->incoming.parser)
        disconnect(service, HONED_CANCELLED, HONED_CANCELLED, "the connection was freed before the answer came");
    close_descriptor(&service->epoll);
    close_descriptor(&service->timer);
    service_drop(service);
}

void service_keep(honed_service *service)
{
    service->references++;
}

void service_drop(honed_service *service)
{
    if (!--service->references)
        free_service(service);
}

void honed_service_timeout(honed_service *service, int timeout)
{
    service->timeout = timeout;
}

const char *honed_service_error(const honed_service *service)
{
    return service->failure.text;
}

int honed_service_fd(const honed_service *service)
{
    return service->epoll;
}

/* ---- Waiting ---- */

void pump(honed_service *service, int64_t until)
{
    struct epoll_event events[2];
    int64_t first = earliest(service);
    int count = epoll_wait(service->epoll, events, 2, milliseconds_until(first < until ? first : until));
    for (int i = 0; i < count; i++) {
        if (events[i].data.fd == service->timer) {
            uint64_t times;
            if (read(service->timer, &times, sizeof times) > 0)
                service->armed = NEVER;
        } else if (events[i].data.fd == service->socket) {
            if (events[i].events & EPOLLOUT)
                flush(service);
            if (service->socket >= 0 && events[i].events & ~(uint32_t)EPOLLOUT)
                receive(service);
        }
    }
    if (service->first) /* what was released meanwhile */
        flush(service);
    expire(service);
}

/* ---- Connecting ---- */

static honed_code cannot_connect(const honed_service *service, struct failure *failure, int error)
{
    if (error == EACCES || error == EPERM)
        return fail(failure, HONED_PERMISSION_DENIED,
                    "%s may not be opened by this user; run 'sudo usermod -aG honed USER' and log in again", service->path);
    if (error == EAGAIN)
        return fail(failure, HONED_UNAVAILABLE, "too many apps are connecting to %s; try again", service->path);
    return fail(failure, HONED_UNAVAILABLE,
                "no service answers at %s (%s); start it with 'systemctl start honed', or 'honed' as an ordinary user",
                service->path, strerror(error));
}

honed_code service_connect(honed_service *service, struct failure *failure)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int error = 0;
    if (service->closed)
        return fail(failure, HONED_INVALID_ARGUMENT, "the connection was freed; make what needs it before, or keep it");
    if (service->socket >= 0 && !service->calls) /* nobody waits: what comes can only be of calls given up, or the end */
        for (int i = 0; i < READS && service->socket >= 0 && receive(service); i++)
            ;
    if (service->socket >= 0 && !service->calls && service->first && service->first->sent)
        disconnect(service, HONED_CANCELLED, HONED_CANCELLED, ""); /* in the middle of a message that nobody wants any more */
    if (service->socket >= 0)
        return HONED_OK;
    if (strlen(service->path) >= sizeof address.sun_path)
        return fail(failure, HONED_INVALID_ARGUMENT, "%s is too long for the path of a socket", service->path);
    strcpy(address.sun_path, service->path);
    service->socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (service->socket < 0 || connect(service->socket, (struct sockaddr *)&address, sizeof address) ||
        !watch(service, service->socket, EPOLLIN, EPOLL_CTL_ADD)) {
        error = errno;
        close_descriptor(&service->socket);
        return cannot_connect(service, failure, error);
    }
    succeed(&service->last_words);
    if (!++service->connections)
        service->connections = 1; /* 0 is none */
    return HONED_OK;
}

honed_code honed_service_connect(honed_service *service, int timeout)
{
    int64_t end = moment_after(timeout);
    int pause = FIRST_PAUSE;
    for (;;) {
        honed_code code;
        int left;
        succeed(&service->failure);
        code = service_connect(service, &service->failure);
        left = milliseconds_until(end);
        if (code != HONED_UNAVAILABLE || left == 0)
            return code;
        rest(left >= 0 && left < pause ? left : pause);
        pause = 2 * pause < LONGEST_PAUSE ? 2 * pause : LONGEST_PAUSE;
    }
}

honed_code ask(honed_service *service, struct call *call, struct frame *frame)
{
    honed_code code;
    succeed(&service->failure);
    code = !frame || frame->failed ? fail_memory(&service->failure) : service_connect(service, &service->failure);
    if (code) {
        frame_free(frame);
        return code;
    }
    call_begin(service, call, frame, moment_after(service->timeout), false);
    while (under_way(call))
        pump(service, NEVER);
    set_timer(service);
    service->failure = call->failure;
    return service->failure.code;
}
