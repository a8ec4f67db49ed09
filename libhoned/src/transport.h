/* What the files about the connection share. */
#ifndef HONED_TRANSPORT_H
#define HONED_TRANSPORT_H

#include "internal.h"

/* transport.c */
bool watch(honed_service *service, int descriptor, uint32_t events, int how); /* by the epoll */
void close_descriptor(int *descriptor);
/* Ends the connection, and the calls that wait: those that were sent whole with the one code, the others with the other. */
void disconnect(honed_service *service, honed_code sent, honed_code unsent, const char *why);
void queue(honed_service *service, struct frame *frame);
/* Takes a call's frame of which nothing was sent out of the queue again; false where there is none. */
bool unqueue(honed_service *service, const struct call *call);
void flush(honed_service *service);   /* sends what can be sent */
bool receive(honed_service *service); /* takes what one read gives; false where there was nothing */

/* calls.c */
int64_t earliest(const honed_service *service); /* the first deadline */
void expire(honed_service *service);            /* ends the calls whose deadline has passed */

#endif
