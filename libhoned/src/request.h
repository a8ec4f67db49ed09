/* What the files about requests share. */
#ifndef HONED_REQUEST_H
#define HONED_REQUEST_H

#include "internal.h"

enum { ENGINE_BYTES = 32 };

/* An input, or an output asked for. */
struct binding {
    char *name;
    int64_t *shape;
    size_t rank, bytes;
    honed_type type;
    const void *data;     /* of an input that is sent */
    honed_buffer *buffer; /* or where it lies; NULL for an output that is sent */
    size_t offset;
};

struct bindings {
    size_t count;
    struct binding *of;
};

struct honed_request {
    struct call call; /* first: calls are taken for it */
    honed_service *service;
    honed_request *next_done;
    bool collected; /* to be, by honed_collect */
    char *model;
    struct bindings inputs, wanted;
    int timeout, priority;
    bool finite;
    bool compiled; /* only a verified compiled form may answer */
    uint64_t sequence;
    unsigned flags;
    struct tensors outputs;
    void *data; /* of the outputs that were sent */
    size_t room;
    uint64_t queue_us, compute_us;
    char engine[ENGINE_BYTES];
    struct failure failure;
};

/* request.c */
honed_code not_now(honed_request *request); /* INVALID_ARGUMENT while it is on its way */
void forget_done(honed_service *service, honed_request *request); /* it does not wait to be collected any more */

/* asking.c. Until when the answer is of use, in ms; and the message, or NULL and the failure why. */
int time_limit(const honed_request *request);
struct frame *message_of(honed_request *request);

/* answer.c */
void take_answer(struct call *call, const struct message *message, const struct value *result);

/* calling.c */
void request_ended(struct call *call);

#endif
