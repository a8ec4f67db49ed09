/* What an app's background thread asks the service: to take a file (ModelBring), and for a compiled form (ModelForm). */
#ifndef HONED_ORT_ASKING_H
#define HONED_ORT_ASKING_H

#include "../src/internal.h"

enum { MOST_TENSORS = 32, MOST_SIZES = 8, MODEL_NAME_BYTES = 65, WHY_BYTES = 256, DIGEST_BYTES = 65 };

/* The inputs of a kind. */
struct shapes {
    size_t count;
    const char *names[MOST_TENSORS];
    size_t ranks[MOST_TENSORS];
    int64_t sizes[MOST_TENSORS][MOST_SIZES];
};

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

/* SHA-256 of a file as hex; false where it cannot be read. */
bool digest_file(int descriptor, char *hex);

/*
 * Hands the file `descriptor` over, to be compiled first for `shapes`; `name` is its own, and external data is read from beside
 * it, out of `folder`, which is -1 where there is none. `model` gets the name by which the service knows it.
 */
honed_code bring(honed_service *service, int descriptor, const char *name, int folder, const struct shapes *shapes,
                 const char *precision, char *model);

/* `report` may be NULL. */
honed_code ask_form(honed_service *service, const char *model, const struct shapes *shapes, const struct report *report,
                    struct form *form);

#endif
