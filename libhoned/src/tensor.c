/* Types, shapes, and tensors as the service describes them. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

enum { MAX_RANK = 64 };

static const struct {
    const char *name;
    size_t bytes;
} types[] = {
    [HONED_UNKNOWN] = {"", 0},    [HONED_BOOL] = {"BOOL", 1},     [HONED_UINT8] = {"UINT8", 1},
    [HONED_INT8] = {"INT8", 1},   [HONED_UINT16] = {"UINT16", 2}, [HONED_INT16] = {"INT16", 2},
    [HONED_UINT32] = {"UINT32", 4}, [HONED_INT32] = {"INT32", 4}, [HONED_UINT64] = {"UINT64", 8},
    [HONED_INT64] = {"INT64", 8}, [HONED_FP16] = {"FP16", 2},     [HONED_FP32] = {"FP32", 4},
    [HONED_FP64] = {"FP64", 8},
};
enum { TYPES = sizeof types / sizeof *types };

const char *honed_type_name(honed_type type)
{
    return (size_t)type < TYPES ? types[type].name : "";
}

size_t honed_type_bytes(honed_type type)
{
    return (size_t)type < TYPES ? types[type].bytes : 0;
}

int64_t count_bytes(honed_type type, const int64_t *shape, size_t rank)
{
    int64_t bytes = (int64_t)honed_type_bytes(type);
    bool none = false;
    for (size_t i = 0; i < rank; i++) {
        if (shape[i] < 0)
            return -1;
        none = none || shape[i] == 0;
    }
    if (!bytes)
        return -1;
    if (none)
        return 0;
    for (size_t i = 0; i < rank; i++)
        if (__builtin_mul_overflow(bytes, shape[i], &bytes) || bytes > (int64_t)(SIZE_MAX / 2))
            return -2;
    return bytes;
}

void tensors_free(struct tensors *tensors)
{
    free(tensors->of);
    *tensors = (struct tensors){0};
}

/* Bytes of all names, and sizes in all shapes; false where it is no array of tensors. */
static bool measure(const struct message *message, const struct value *array, size_t *names, size_t *sizes)
{
    *names = *sizes = 0;
    if (!array || array->kind != ARRAY)
        return false;
    for (uint32_t i = 0; i < array->size; i++) {
        const struct value *tensor = item(message, array, i);
        const struct value *name = find(message, tensor, "name"), *shape = find(message, tensor, "shape");
        if (!plain_text(message, name) || !shape || shape->kind != ARRAY || shape->size > MAX_RANK)
            return false;
        *names += name->size + 1;
        *sizes += shape->size;
    }
    return true;
}

static honed_type read_type(const struct message *message, const struct value *text)
{
    for (size_t i = 1; i < TYPES; i++)
        if (is_text(message, text, types[i].name))
            return (honed_type)i;
    return HONED_UNKNOWN;
}

static bool read_shape(const struct message *message, const struct value *array, bool open, int64_t *shape)
{
    for (uint32_t i = 0; i < array->size; i++) {
        const struct value *size = item(message, array, i);
        if (size->kind == NUMBER && size->at <= INT64_MAX)
            shape[i] = (int64_t)size->at;
        else if (open && size->kind == NEGATIVE)
            shape[i] = -1;
        else
            return false;
    }
    return true;
}

static honed_code read_all(struct tensors *tensors, const struct message *message, const struct value *array, bool open,
                           struct failure *failure)
{
    size_t names, sizes;
    int64_t *shape;
    char *name;
    if (!measure(message, array, &names, &sizes))
        return fail_nonsense(failure, "no list of tensors");
    tensors->of = calloc(1, array->size * sizeof *tensors->of + sizes * sizeof *shape + names + 1);
    if (!tensors->of)
        return fail_memory(failure);
    tensors->count = array->size;
    shape = (int64_t *)(tensors->of + tensors->count);
    name = (char *)(shape + sizes);
    for (uint32_t i = 0; i < array->size; i++) {
        const struct value *given = item(message, array, i), *text = find(message, given, "name");
        const struct value *dims = find(message, given, "shape");
        honed_tensor *tensor = &tensors->of[i];
        if (!read_shape(message, dims, open, shape))
            return fail_nonsense(failure, "a shape that is none");
        if (text->size)
            memcpy(name, message->bytes + text->at, text->size);
        *tensor = (honed_tensor){.name = name, .shape = shape, .rank = dims->size};
        tensor->type = read_type(message, find(message, given, "datatype"));
        tensor->bytes = count_bytes(tensor->type, shape, tensor->rank);
        if (tensor->bytes < -1)
            return fail_nonsense(failure, "a shape beyond all memory");
        shape += tensor->rank;
        name += text->size + 1;
    }
    return HONED_OK;
}

honed_code tensors_read(struct tensors *tensors, const struct message *message, const struct value *array, bool open,
                        struct failure *failure)
{
    honed_code code;
    tensors_free(tensors);
    code = read_all(tensors, message, array, open, failure);
    if (code)
        tensors_free(tensors);
    return code;
}

const char *honed_tensor_name(const honed_tensor *tensor)
{
    return tensor->name;
}

honed_type honed_tensor_type(const honed_tensor *tensor)
{
    return tensor->type;
}

size_t honed_tensor_rank(const honed_tensor *tensor)
{
    return tensor->rank;
}

const int64_t *honed_tensor_shape(const honed_tensor *tensor)
{
    return tensor->shape;
}

int64_t honed_tensor_bytes(const honed_tensor *tensor)
{
    return tensor->bytes;
}

const void *honed_tensor_data(const honed_tensor *tensor)
{
    return tensor->data;
}
