/* Bytes and descriptors: what goes out, and what comes in. */
#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport.h"

enum { READS = 64 }; /* at most, of what a service said before it went away: more than a socket holds */

bool watch(honed_service *service, int descriptor, uint32_t events, int how)
{
    struct epoll_event event = {.events = events, .data.fd = descriptor};
    return epoll_ctl(service->epoll, how, descriptor, &event) == 0;
}

void close_descriptor(int *descriptor)
{
    if (*descriptor >= 0)
        close(*descriptor);
    *descriptor = -1;
}

void disconnect(honed_service *service, honed_code sent, honed_code unsent, const char *why)
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

void queue(honed_service *service, struct frame *frame)
{
    if (service->last)
        service->last->next = frame;
    else
        service->first = frame;
    service->last = frame;
}

bool unqueue(honed_service *service, const struct call *call)
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

void send_unanswered(honed_service *service, struct frame *frame)
{
    if (!frame || frame->failed || service->socket < 0 || service->broken) {
        frame_free(frame);
        return;
    }
    queue(service, frame);
    flush(service);
}

/* ---- Out ---- */

static ssize_t send_part(int socket, const struct frame *frame)
{
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int) * MOST_DESCRIPTORS)];
    } control = {{0}};
    struct iovec bytes = {frame->bytes + frame->sent, frame->size - frame->sent};
    struct msghdr message = {.msg_iov = &bytes, .msg_iovlen = 1};
    if (frame->descriptor_count && !frame->sent) {
        size_t size = sizeof(int) * frame->descriptor_count;
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE(size);
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN(size);
        memcpy(CMSG_DATA(&control.header), frame->descriptors, size);
    }
    return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

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

void flush(honed_service *service)
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
    if (item(message, root, 2)->kind != NIL) {
        fail_as_told(&(*answered)->failure, message, item(message, root, 2));
        if ((*answered)->refused)
            (*answered)->refused(*answered, message, item(message, root, 2));
    } else
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
        if (answered && answered->state == CALL_HELD) {
            call_release(service, answered);
            flush(service);
        } else if (answered) {
            call_end(service, answered);
        }
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

/* Descriptors that come along are closed by the kernel. */
bool receive(honed_service *service)
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
