/*
 * Runs the scenarios of policy.json, which test_policy.py writes as lines, through the machine in C:
 *   scenario NAME ALLOWANCE HALF | pass NS | own TOOK TIMES | routed TOOK TIMES | failed TOOK TIMES | begin own|routed
 *   end routed|failed TOOK | known NS HALF | unknown | expect KEY VALUE
 * Each line of output is a mismatch.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "policy.h"

static struct account account;
static struct route route;
static int64_t now;
static char scenario[200];
static int step;

static void mismatch(const char *what, const char *is)
{
    printf("%s, step %d: %s, but it is %s\n", scenario, step, what, is);
}

static bool begin(bool routed)
{
    int64_t given = route_begin(&route, now);
    if (!given == !routed)
        return true;
    mismatch(routed ? "the run is routed" : "the run is own", given ? "routed" : "own");
    return false;
}

static void expect(const char *key, const char *value)
{
    char is[64] = "";
    if (!strcmp(key, "state"))
        snprintf(is, sizeof is, "%s", route_state_name(route.state));
    else if (!strcmp(key, "ask"))
        snprintf(is, sizeof is, "%s", (const char *[]){"nothing", "ask", "report"}[route_ask(&route, now)]);
    else if (!strcmp(key, "why"))
        snprintf(is, sizeof is, "%s", route_why_text(route.why));
    else if (!strcmp(key, "rests"))
        snprintf(is, sizeof is, "%s", route_rests(&route, now) ? "true" : "false");
    else if (!strcmp(key, "deadline"))
        snprintf(is, sizeof is, "%" PRId64, route_begin(&route, now));
    else if (!strcmp(key, "own_runs"))
        snprintf(is, sizeof is, "%" PRIu64, route.own_runs);
    else if (!strcmp(key, "excess"))
        snprintf(is, sizeof is, "%" PRId64, account.excess);
    if (strcmp(*is ? is : "null", value)) {
        char what[300];
        snprintf(what, sizeof what, "%s is %.200s", key, value);
        mismatch(what, is);
    }
}

int main(void)
{
    char line[512], word[32], more[256];
    double allowance;
    int64_t took;
    int times, half;
    while (fgets(line, sizeof line, stdin)) {
        step++;
        if (sscanf(line, "scenario %199s %lf %d", scenario, &allowance, &half) == 3) {
            now = 1000000000000;
            step = 0;
            account = (struct account){.begun = now};
            route_init(&route, &account, allowance, half, now);
        } else if (sscanf(line, "pass %" SCNd64, &took) == 1) {
            now += took;
        } else if (sscanf(line, "%31s %" SCNd64 " %d", word, &took, &times) == 3 && strcmp(word, "known")) {
            bool routed = strcmp(word, "own");
            for (int i = 0; i < times && begin(routed); i++) {
                now += took;
                if (!routed)
                    route_ran_own(&route, now, took);
                else if (!strcmp(word, "routed"))
                    route_ran_routed(&route, now, took);
                else
                    route_failed(&route, now, took);
            }
        } else if (sscanf(line, "begin %31s", word) == 1) {
            begin(!strcmp(word, "routed"));
        } else if (sscanf(line, "end %31s %" SCNd64, word, &took) == 2) {
            (strcmp(word, "failed") ? route_ran_routed : route_failed)(&route, now, took);
        } else if (sscanf(line, "known %" SCNd64 " %d", &took, &half) == 2) {
            route_known(&route, now, took, half);
        } else if (!strcmp(line, "unknown\n")) {
            route_unknown(&route, now);
        } else if (sscanf(line, "expect %31s %255[^\n]", word, more) == 2) {
            expect(word, more);
        } else {
            mismatch("a step", line);
        }
    }
    return 0;
}
