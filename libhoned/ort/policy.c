/* The state machine of a route. */
#include "policy.h"

#include <string.h>

static const int64_t MS = 1000000, SECOND = 1000000000;
#define OVERHEAD (MS / 5)           /* what a request costs beside the run, until it is measured */
#define DEADLINE_LEAST (10 * MS)    /* below that a deadline would measure the scheduler */
#define FIRST_PAUSE SECOND
#define LONGEST_PAUSE (300 * SECOND)
#define LONGEST_WAIT (10 * SECOND) /* after an answer that there is no form, which is no failure */
#define FIRST_LOOK (60 * SECOND)
#define LONGEST_LOOK (600 * SECOND)
#define REPORT_EVERY (60 * SECOND)
enum { DEADLINE_MEDIANS = 3, BUDGET_DIVISOR = 50 };

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t over(int64_t a, int64_t b)
{
    return a > b ? a - b : 0;
}

static void add(struct row *row, int64_t took)
{
    row->times[row->count++ % ROW] = took;
}

int64_t row_median(const struct row *row)
{
    int64_t sorted[ROW];
    unsigned count = row->count < ROW ? row->count : ROW;
    for (unsigned i = 0; i < count; i++) {
        unsigned at = i;
        for (; at && sorted[at - 1] > row->times[i]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = row->times[i];
    }
    return count ? sorted[(count - 1) / 2] : 0;
}

/* What a routed run may take. */
static int64_t limit(const struct route *route)
{
    return (int64_t)((double)route->own_median * route->allowance);
}

static int64_t deadline(const struct route *route)
{
    int64_t medians = DEADLINE_MEDIANS * (limit(route) > route->own_median ? limit(route) : route->own_median);
    return medians > DEADLINE_LEAST ? medians : DEADLINE_LEAST;
}

static bool affords(const struct route *route, int64_t now, int64_t more)
{
    return route->account->excess + more <= (now - route->account->begun) / BUDGET_DIVISOR;
}

static bool promises(const struct route *route)
{
    return route->form_time + route->overhead <= limit(route);
}

static void fall_back_for(struct route *route, int64_t now, enum route_why why, int64_t longest)
{
    route->state = ROUTE_OWN;
    route->why = why;
    route->ask_at = now + least(route->pause, longest);
    if (route->pause < longest)
        route->pause = least(2 * route->pause, longest);
    route->look_pause = FIRST_LOOK;
}

static void fall_back(struct route *route, int64_t now, enum route_why why)
{
    fall_back_for(route, now, why, LONGEST_PAUSE);
}

static void settle(struct route *route, int64_t now)
{
    route->state = ROUTE_ROUTED;
    route->why = WHY_NONE;
    route->routed.count = 0;
    route->look_at = now + route->look_pause;
    route->look_pause = least(2 * route->look_pause, LONGEST_LOOK);
    route->ask_at = now + REPORT_EVERY;
}

void route_init(struct route *route, struct account *account, double allowance, bool half, int64_t now)
{
    memset(route, 0, sizeof *route);
    route->account = account;
    route->allowance = allowance;
    route->half = half;
    route->overhead = OVERHEAD;
    route->pause = FIRST_PAUSE;
    route->look_pause = FIRST_LOOK;
    route->reported = now - REPORT_EVERY;
}

int64_t route_begin(struct route *route, int64_t now)
{
    if (route->state == ROUTE_TRYING) {
        if (route->own.count < TRY_ROW)
            return 0;
        if (!affords(route, now, (route->in_flight + 1) * deadline(route))) {
            route->why = WHY_BUDGET;
            return 0;
        }
    } else if (route->state != ROUTE_ROUTED) {
        return 0;
    } else if (now >= route->look_at &&
               affords(route, now, CHECK_ROW * over(route->own_median, route->routed_median))) {
        route->state = ROUTE_CHECKING;
        route->own.count = 0;
        return 0;
    }
    route->in_flight++;
    return deadline(route);
}

void route_ran_own(struct route *route, int64_t now, int64_t took)
{
    route->own_runs++;
    add(&route->own, took);
    if (route->state == ROUTE_OWN && route->own.count >= ROW && route->why <= WHY_SHORT && now >= route->ask_at) {
        route->own_median = row_median(&route->own);
        if (limit(route) > route->overhead)
            route->why = WHY_SERVICE;
        else
            fall_back(route, now, WHY_SHORT);
    } else if (route->state == ROUTE_TRYING && route->own.count >= TRY_ROW) {
        route->own_median = row_median(&route->own);
        if (!promises(route) && !route->routed.count && !route->in_flight)
            fall_back(route, now, WHY_PROMISE);
    } else if (route->state == ROUTE_CHECKING) {
        route->account->excess += over(took, route->routed_median);
        if (route->own.count < CHECK_ROW)
            return;
        route->own_median = row_median(&route->own);
        if (route->routed_median <= limit(route))
            settle(route, now);
        else
            fall_back(route, now, WHY_LOST);
    }
}

/* The majority of a row decides, as soon as there is one. */
static void judge_try(struct route *route, int64_t now, int64_t took)
{
    route->account->excess += over(took, limit(route));
    route->slow += took > limit(route);
    if (2 * route->slow < TRY_ROW && 2 * (route->routed.count - route->slow) <= TRY_ROW)
        return;
    route->routed_median = row_median(&route->routed);
    route->overhead = over(route->routed_median, route->form_time);
    if (2 * route->slow < TRY_ROW)
        settle(route, now);
    else
        fall_back(route, now, WHY_LOST);
}

void route_ran_routed(struct route *route, int64_t now, int64_t took)
{
    route->in_flight--;
    route->routed_runs++;
    add(&route->routed, took);
    if (route->state == ROUTE_TRYING) {
        judge_try(route, now, took);
    } else if (route->state == ROUTE_ROUTED && route->routed.count % ROW == 0) {
        route->routed_median = row_median(&route->routed);
        route->pause = FIRST_PAUSE;
        if (route->routed_median > limit(route)) {
            route->account->excess += ROW * (route->routed_median - limit(route));
            route->look_at = now;
        }
    }
}

void route_failed(struct route *route, int64_t now, int64_t took)
{
    route->in_flight--;
    route->own_runs++;
    route->account->excess += took;
    if (route->state != ROUTE_OWN)
        fall_back(route, now, WHY_FAILED);
}

enum route_ask route_ask(struct route *route, int64_t now)
{
    bool settled = route->state == ROUTE_ROUTED || (route->state == ROUTE_OWN && route->why > WHY_SHORT);
    if (!settled || route->asking || now < route->ask_at)
        return ASK_NOTHING;
    route->asking = true;
    if (now - route->reported < REPORT_EVERY)
        return ASK_ONLY;
    route->reported = now;
    return ASK_REPORTING;
}

void route_known(struct route *route, int64_t now, int64_t form_time, bool half)
{
    if (half && !route->half) {
        route_unknown(route, now);
        return;
    }
    route->asking = false;
    route->form_time = form_time;
    if (route->state == ROUTE_ROUTED) {
        route->ask_at = now + REPORT_EVERY;
    } else if (route->state == ROUTE_OWN && now >= route->ask_at) { /* else it was asked before a failure */
        route->own_median = row_median(&route->own);
        if (!promises(route)) {
            fall_back(route, now, WHY_PROMISE);
            route->overhead -= over(route->overhead, OVERHEAD) / 2; /* a lost row does not count for ever */
            return;
        }
        route->state = ROUTE_TRYING;
        route->why = WHY_NONE;
        route->own.count = route->routed.count = route->slow = 0;
    }
}

void route_unknown(struct route *route, int64_t now)
{
    route->asking = false;
    fall_back_for(route, now, WHY_SERVICE, LONGEST_WAIT);
}

bool route_rests(const struct route *route, int64_t now)
{
    return route->state == ROUTE_OWN && route->own.count >= ROW && (route->asking || now < route->ask_at);
}

const char *route_state_name(enum route_state state)
{
    static const char *const names[] = {"own", "trying", "routed", "checking"};
    return names[state];
}

const char *route_why_text(enum route_why why)
{
    static const char *const texts[] = {
        "too few runs so far",
        "a request takes longer than a run of the app's own",
        "the service has no verified compiled form for these sizes",
        "the compiled form would take longer",
        "routed runs took longer",
        "a routed run failed",
        "switching has cost 2 % of the app's time",
        "",
    };
    return texts[why];
}
