/* What an app's background thread asks the service beside ModelBring: for a compiled form (ModelForm). */
#ifndef HONED_ORT_ASKING_H
#define HONED_ORT_ASKING_H

#include "../src/bring.h"

enum { WHY_BYTES = 256 };

struct report {
    const char *app, *state, *why;
    int64_t own_us, routed_us;
    uint64_t own_runs, routed_runs;
};

/* What the service says of the compiled form for a kind. */
struct form {
    bool verified, half;
    int64_t time_us;
    char why[WHY_BYTES];
};

/* `report` may be NULL. */
honed_code ask_form(honed_service *service, const char *model, const struct shapes *shapes, const struct report *report,
                    struct form *form);

#endif
