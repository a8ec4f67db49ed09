/* What the files of the library share; nothing of it is visible outside. */
#ifndef HONED_INTERNAL_H
#define HONED_INTERNAL_H

#include <stdbool.h>

#include "honed.h"
#include "message.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tensors travel little-endian, and this library does not turn them"
#endif

#define NEVER INT64_MAX /* a moment */

enum { ERROR_BYTES = 1024, MOST_DESCRIPTORS = 32 };

/* What went wrong: a code and a sentence. */
struct failure {
    honed_code code;
    char text[ERROR_BYTES];
};

/* A message on its way to the service. */
struct frame {
    struct frame *next;
    size_t references;
    struct call *call; /* that waits for the answer; NULL where none does */
    const int *descriptors; /* sent with the first byte; they stay their owner's */
    size_t descriptor_count;
    bool failed;       /* memory was short: it is not whole */
    size_t size, room, sent;
    char *bytes;
};

enum call_state {
    CALL_IDLE,
    CALL_HELD, /* waits for its buffers to be known to the service */
    CALL_SENT, /* queued or sent */
    CALL_ENDED
};

/* A request that wants an answer. */
struct call {
    struct call *before, *next; /* among the unanswered */
    struct frame *held;
    enum call_state state;
    bool whole; /* all of it was sent */
    uint32_t msgid;
    int64_t deadline;
    struct failure failure;
    /* Takes the result; a failure is that of the call. */
    void (*take)(struct call *call, const struct message *message, const struct value *result);
    /* Takes what an error says beside its code; may be NULL. It may hold another frame, which is sent then. */
    void (*refused)(struct call *call, const struct message *message, const struct value *error);
    /* Told when it has ended, whichever way; may be NULL. */
    void (*ended)(struct call *call);
};

struct tensors {
    size_t count;
    honed_tensor *of; /* one block, with names and shapes behind them */
};

struct honed_tensor {
    const char *name;
    const int64_t *shape;
    const void *data;
    size_t rank;
    int64_t bytes;
    honed_type type;
};

struct honed_service {
    size_t references;
    bool closed;
    char *path;
    int timeout; /* ms */
    int epoll, timer, socket;
    bool writable_wanted, broken; /* `broken`: nothing can be sent any more, but what came may still be read */
    uint32_t connections, msgids;
    int64_t armed; /* the moment the timer is set to */
    struct frame *first, *last;
    struct call *calls;
    struct honed_request *done_first, *done_last;
    unsigned long buffers; /* made so far */
    struct message incoming;
    struct failure last_words;
    struct failure failure;
};

struct honed_buffer {
    struct call telling; /* first: calls are taken for it */
    honed_service *service;
    size_t references;
    char name[24];
    int descriptor;
    void *data;
    size_t bytes;
    uint32_t known; /* the connection whose service knows it; 0 none */
};

/* failure.c */
honed_code fail(struct failure *failure, honed_code code, const char *form, ...) __attribute__((format(printf, 3, 4)));
honed_code fail_memory(struct failure *failure);
honed_code fail_nonsense(struct failure *failure, const char *what);
/* Of the map that an error is. */
honed_code fail_as_told(struct failure *failure, const struct message *message, const struct value *error);
void succeed(struct failure *failure);

/* frame.c: the msgpack_pack functions of frames. After the last one `failed` says whether memory was short. */
struct frame *frame_new(size_t room);
void frame_keep(struct frame *frame);
void frame_free(struct frame *frame); /* unless somebody else keeps it */
void put_request(struct frame *frame, uint32_t msgid, const char *method);
void put_notification(struct frame *frame, const char *method);
void put_map(struct frame *frame, size_t pairs);
void put_array(struct frame *frame, size_t count);
void put_text(struct frame *frame, const char *text);
void put_uint(struct frame *frame, uint64_t value);
void put_int(struct frame *frame, int64_t value);
void put_bool(struct frame *frame, bool value);
void put_bytes(struct frame *frame, const void *data, size_t size);
void put_packed(struct frame *frame, const void *data, size_t size); /* what was put into another frame */

/* service.c */
void service_keep(honed_service *service);
void service_drop(honed_service *service);
honed_code service_connect(honed_service *service, struct failure *failure);
void pump(honed_service *service, int64_t until); /* waits for news until then, at most, and takes them */
/* The whole of a call: connects, sends, waits. Takes the frame. */
honed_code ask(honed_service *service, struct call *call, struct frame *frame);

/* transport.c: sends what nobody waits for the answer of; takes the frame, which may be NULL. */
void send_unanswered(honed_service *service, struct frame *frame);

/* calls.c */
int64_t now(void);                      /* nanoseconds of the monotonic clock */
int64_t moment_after(int timeout);      /* from now; -1 gives NEVER */
int milliseconds_until(int64_t moment); /* rounded up; -1 for NEVER */
void rest(int milliseconds);
void set_timer(honed_service *service); /* so that the epoll tells of deadlines, and of requests to be collected */
bool under_way(const struct call *call);
/* Makes an idle call out of its frame, which it takes, and sends what can be sent; or holds it. */
void call_begin(honed_service *service, struct call *call, struct frame *frame, int64_t deadline, bool hold);
void call_release(honed_service *service, struct call *call); /* queues a held one */
void call_end(honed_service *service, struct call *call);     /* as its failure says */
void call_cancel(honed_service *service, struct call *call, honed_code code, const char *why);

/* buffer.c */
bool buffer_known(const honed_buffer *buffer); /* to the service at the other end now */
void buffer_tell(honed_buffer *buffer);        /* begins to tell it, unless that is under way */
void buffer_keep(honed_buffer *buffer);

/* calling.c: the result of announcing a buffer, for the requests that wait for it */
void requests_told(honed_buffer *buffer);

/* tensor.c */
/* Of [{"name", "datatype", "shape"}, ...]; open sizes where `open`. The old ones are freed. */
honed_code tensors_read(struct tensors *tensors, const struct message *message, const struct value *array, bool open,
                        struct failure *failure);
void tensors_free(struct tensors *tensors);
/* Bytes of all elements; -1 where a size is negative or the type unknown; -2 where they are too many to count. */
int64_t count_bytes(honed_type type, const int64_t *shape, size_t rank);

#endif
