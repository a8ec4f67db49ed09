/* ModelBring, and what ModelForm has in common with it. */
#ifndef HONED_BRING_H
#define HONED_BRING_H

#include "internal.h"

enum { MOST_TENSORS = 32, MOST_SIZES = 8, MODEL_NAME_BYTES = 65, DIGEST_BYTES = 65 };

/* The shapes of a model's inputs. */
struct shapes {
    size_t count;
    const char *names[MOST_TENSORS];
    size_t ranks[MOST_TENSORS];
    int64_t sizes[MOST_TENSORS][MOST_SIZES];
};

/* `shapes` of a model that the program runs by itself, to be compiled first for these; NULL of one that the service is to run. */
struct bring_options {
    const char *precision;
    const struct shapes *shapes;
};

/* SHA-256 of a file as hex; false where it cannot be read. */
bool digest_file(int descriptor, char *hex);

/*
 * Hands the file `descriptor` over; `name` is its own, and external data is read from beside it, out of `folder`, which is -1
 * where there is none. `model` gets the name by which the service knows it.
 */
honed_code bring(honed_service *service, int descriptor, const char *name, int folder, const struct bring_options *options,
                 char *model);

/* The last part of a path, and a descriptor of the folder that it lies in. */
const char *name_of(const char *path);
int open_folder_of(const char *path);

void put_shapes(struct frame *frame, const struct shapes *shapes, bool scalars);
/* Text without a zero byte, as much as there is room for; else "". */
void copy_text(char *into, size_t room, const struct message *message, const struct value *text);

#endif
