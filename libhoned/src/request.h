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

/* A request but for its data and timeout, packed: pairs of its map, and behind them those of its parameters. */
struct likeness {
    struct frame *packed;
    size_t pairs, options_at, options;
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
    /* What calls have in common that differ in their data and timeout, and the connection on which it was answered. */
    struct likeness form;
    uint32_t answered_on;
    struct call preparing;
    uint64_t number; /* by which the service knows the form, on one connection */
    uint32_t number_on;
    struct frame *run; /* the call by that number that is under way; NULL for one that was sent whole */
    size_t contents_at;
};

/* request.c */
honed_code not_now(honed_request *request); /* INVALID_ARGUMENT while it is on its way */
void forget_done(honed_service *service, honed_request *request); /* it does not wait to be collected any more */

/* asking.c. Until when the answer is of use, in ms; and the message, or NULL and the failure why. */
int time_limit(const honed_request *request);
struct frame *message_of(honed_request *request);
void forget_form(honed_request *request);
void take_number(struct call *call, const struct message *message, const struct value *result);
/* Holds the whole request in the place of one by a number that the service does not know any more. */
void take_refusal(struct call *call, const struct message *message, const struct value *error);

/* answer.c */
void take_answer(struct call *call, const struct message *message, const struct value *result);

/* calling.c */
void request_ended(struct call *call);

#endif
