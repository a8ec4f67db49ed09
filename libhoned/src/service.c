/* The connection: what goes out, what comes in, and the calls that wait for an answer. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

static const char system_socket[] = "/run/honed/honed.sock";
enum { USUAL_TIMEOUT = 60000, READS = 64, FIRST_PAUSE = 20, LONGEST_PAUSE = 500 }; /* ms */

/* ---- Time ---- */

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

static int64_t earliest(const honed_service *service)
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

static bool watch(honed_service *service, int descriptor, uint32_t events, int how)
{
    struct epoll_event event = {.events = events, .data.fd = descriptor};
    return epoll_ctl(service->epoll, how, descriptor, &event) == 0;
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

static void close_descriptor(int *descriptor)
{
    if (*descriptor >= 0)
        close(*descriptor);
    *descriptor = -1;
}

static void disconnect(honed_service *service, honed_code sent, honed_code unsent, const char *why)
{
    close_descriptor(&service->socket); /* which takes it out of the epoll, too */
    service->writable_wanted = service->broken = false;
    for (struct frame *frame; (frame = service->first);) {
        service->first = frame->next;
        frame_free(frame);
    }
    service->last = NULL;
    message_restart(&service->incoming);
    for (struct call *call; (call = service->calls);) {
        fail(&call->failure, call->whole ? sent : unsent, "%s", why);
        call_end(service, call);
    }
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

/* ---- Calls ---- */

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

static void queue(honed_service *service, struct frame *frame)
{
    if (service->last)
        service->last->next = frame;
    else
        service->first = frame;
    service->last = frame;
}

/* Takes a frame of which nothing was sent out of the queue again; false where there is none. */
static bool unqueue(honed_service *service, const struct call *call)
{
    struct frame *before = NULL, *frame = service->first;
    while (frame && frame->call != call) {
        before = frame;
        frame = frame->next;
    }
    if (!frame || frame->sent)
        return false;
    if (before)
        before->next = frame->next;
    else
        service->first = frame->next;
    if (service->last == frame)
        service->last = before;
    frame_free(frame);
    return true;
}

static void flush(honed_service *service);

void send_unanswered(honed_service *service, struct frame *frame)
{
    if (!frame || frame->failed || service->socket < 0 || service->broken) {
        frame_free(frame);
        return;
    }
    queue(service, frame);
    flush(service);
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

static void expire(honed_service *service)
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

/* ---- Out ---- */

static ssize_t send_part(int socket, const struct frame *frame)
{
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {{0}};
    struct iovec bytes = {frame->bytes + frame->sent, frame->size - frame->sent};
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1};
    if (frame->descriptor >= 0 && !frame->sent) {
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(&control.header), &frame->descriptor, sizeof(int));
    }
    return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static bool receive(honed_service *service);

/* Nothing can be sent any more. What the service said before it went is read yet: it may say why. */
static void hear_out(honed_service *service)
{
    service->broken = true;
    for (int i = 0; i < READS && service->socket >= 0 && receive(service); i++)
        ;
    if (service->socket >= 0)
        disconnect(service, HONED_DISCONNECTED, HONED_UNAVAILABLE,
                   "the service closed the connection before it answered; try again, its log says why");
}

static void want_writable(honed_service *service, bool wanted)
{
    if (wanted != service->writable_wanted &&
        watch(service, service->socket, EPOLLIN | (wanted ? EPOLLOUT : 0u), EPOLL_CTL_MOD))
        service->writable_wanted = wanted;
}

static void flush(honed_service *service)
{
    struct frame *frame;
    if (service->broken)
        return;
    while (service->socket >= 0 && (frame = service->first)) {
        ssize_t sent = send_part(service->socket, frame);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            want_writable(service, true);
            return;
        }
        if (sent < 0) {
            hear_out(service);
            return;
        }
        frame->sent += (size_t)sent;
        if (frame->sent < frame->size)
            continue;
        if (frame->call)
            frame->call->whole = true;
        service->first = frame->next;
        if (!service->first)
            service->last = NULL;
        frame_free(frame);
    }
    if (service->socket >= 0)
        want_writable(service, false);
}

/* ---- In ---- */

static struct call *waiting(const honed_service *service, const struct value *msgid)
{
    if (msgid->kind == NUMBER)
        for (struct call *call = service->calls; call; call = call->next)
            if (call->state == CALL_SENT && call->msgid == msgid->at)
                return call;
    return NULL;
}

/*
 * Takes [1, msgid, error, result] or [2, method, [params]]; false where it is neither. `*answered` is a call that has its
 * answer now, to be ended when the message is not needed any more: what that leads to may read the next.
 */
static bool take_message(honed_service *service, struct call **answered)
{
    const struct message *message = &service->incoming;
    const struct value *root = &message->root, *type = item(message, root, 0);
    if (!type || type->kind != NUMBER)
        return false;
    if (type->at == 2 && root->size == 3) {
        if (is_text(message, item(message, root, 1), "Error"))
            fail_as_told(&service->last_words, message, item(message, item(message, root, 2), 0));
        return true;
    }
    if (type->at != 1 || root->size != 4)
        return false;
    *answered = waiting(service, item(message, root, 1));
    if (!*answered)
        return true; /* to one given up */
    if (item(message, root, 2)->kind != NIL)
        fail_as_told(&(*answered)->failure, message, item(message, root, 2));
    else
        (*answered)->take(*answered, message, item(message, root, 3));
    return true;
}

static void take_messages(honed_service *service)
{
    enum progress progress;
    while (service->socket >= 0 && (progress = message_parse(&service->incoming)) != MESSAGE_PARTIAL) {
        struct call *answered = NULL;
        if (progress == MESSAGE_NO_MEMORY)
            disconnect(service, HONED_NO_MEMORY, HONED_NO_MEMORY, "this process has no memory left for the answer");
        else if (progress == MESSAGE_WRONG || !take_message(service, &answered))
            disconnect(service, HONED_INTERNAL, HONED_INTERNAL,
                       "the service sent what is no message of its protocol; compare versions");
        else
            message_consume(&service->incoming);
        if (answered)
            call_end(service, answered);
    }
}

static void lost(honed_service *service)
{
    struct failure said = service->last_words;
    if (said.code)
        disconnect(service, said.code, said.code, said.text);
    else
        disconnect(service, HONED_DISCONNECTED, HONED_UNAVAILABLE,
                   "the service closed the connection before it answered; try again, its log says why");
}

/* Takes what one read gives; false where there was nothing. Descriptors that come along are closed by the kernel. */
static bool receive(honed_service *service)
{
    struct message *message = &service->incoming;
    size_t room = message_reserve(message);
    ssize_t got;
    if (!room) {
        disconnect(service, HONED_NO_MEMORY, HONED_NO_MEMORY, "this process has no memory left for the answer");
        return false;
    }
    do
        got = recv(service->socket, message->bytes + message->size, room, MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return false;
    if (got <= 0) {
        lost(service);
        return false;
    }
    message->size += (size_t)got;
    take_messages(service);
    return true;
}

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
