/*
 * Which runs of an app's session go to honed: the state machine of docs/onnxruntime.md, "How a run is routed".
 * It has no clock, no lock and no I/O: the caller brings times in nanoseconds and serialises the calls of a route.
 * honed.ort has the same machine in Python; tests/ort/policy.json is what both must do.
 */
#ifndef HONED_ORT_POLICY_H
#define HONED_ORT_POLICY_H

#include <stdbool.h>
#include <stdint.h>

enum {
    ROW = 20,      /* runs that a median is taken of */
    TRY_ROW = 10,  /* own runs, then routed runs, that are compared */
    CHECK_ROW = 5, /* own runs between routed ones */
};

enum route_state { ROUTE_OWN, ROUTE_TRYING, ROUTE_ROUTED, ROUTE_CHECKING };
enum route_why { WHY_LEARNING, WHY_SHORT, WHY_SERVICE, WHY_PROMISE, WHY_LOST, WHY_FAILED, WHY_BUDGET, WHY_NONE };
enum route_ask { ASK_NOTHING, ASK_ONLY, ASK_REPORTING };

/* What one process has spent on switching, in all its routes. */
struct account {
    int64_t begun, excess;
};

struct row {
    unsigned count; /* of all times added since it was cleared */
    int64_t times[ROW];
};

/* Runs of one session in one kind: equal types and shapes of its inputs, equal outputs. */
struct route {
    struct account *account;
    double allowance;
    bool half; /* forms in fp16 may answer */
    enum route_state state;
    enum route_why why;
    struct row own, routed;
    int64_t own_median, routed_median; /* of the last comparison, 0 before one */
    int64_t form_time, overhead;       /* of the compiled form in the service; of a request beside it */
    bool asking;                       /* the service has not answered yet */
    int64_t ask_at, pause, look_at, look_pause, reported;
    unsigned in_flight, slow;          /* routed runs under way; slower ones of the row on trial */
    uint64_t own_runs, routed_runs;
};

void route_init(struct route *route, struct account *account, double allowance, bool half, int64_t now);

/* A run begins: 0 where the app's own session runs it, else the nanoseconds that the service has for it. */
int64_t route_begin(struct route *route, int64_t now);
/* It has ended. `routed` is what route_begin said; a routed run that failed in whatever way is run by the app's session after. */
void route_ran_own(struct route *route, int64_t now, int64_t took);
void route_ran_routed(struct route *route, int64_t now, int64_t took);
void route_failed(struct route *route, int64_t now, int64_t took);

/* Whether the service is to be asked now, in the background; what it answers is given to one of the next two. */
enum route_ask route_ask(struct route *route, int64_t now);
void route_known(struct route *route, int64_t now, int64_t form_time, bool half);
void route_unknown(struct route *route, int64_t now); /* no verified form for these sizes, or no service */

/* Whether own runs teach nothing now, so that the caller need not find out whose route a run is. */
bool route_rests(const struct route *route, int64_t now);
int64_t row_median(const struct row *row);
const char *route_state_name(enum route_state state);
const char *route_why_text(enum route_why why);

#endif
