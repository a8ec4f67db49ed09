/* What there is to run: the list of models, and what one takes and gives. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

struct honed_model {
    char *name;
    struct tensors inputs, outputs;
};

enum { NAME, STATE, REASON, ENGINE, FIELDS };
static const char *const fields[FIELDS] = {"name", "state", "reason", "engine"};

struct honed_models {
    size_t count;
    const char *(*rows)[FIELDS]; /* one block, with the text behind them */
};

/* ---- One ---- */

struct describing {
    struct call call;
    honed_model *model;
};

static void take_model(struct call *call, const struct message *message, const struct value *result)
{
    honed_model *model = ((struct describing *)call)->model;
    if (!tensors_read(&model->inputs, message, find(message, result, "inputs"), true, &call->failure))
        tensors_read(&model->outputs, message, find(message, result, "outputs"), true, &call->failure);
}

static struct frame *about_model(honed_service *service, struct call *call, const char *method, const char *model)
{
    struct frame *frame = frame_new(256);
    call->msgid = ++service->msgids;
    if (!frame)
        return NULL;
    put_request(frame, call->msgid, method);
    put_map(frame, model ? 1 : 0);
    if (model) {
        put_text(frame, "name");
        put_text(frame, model);
    }
    return frame;
}

honed_code honed_describe(honed_service *service, const char *model, honed_model **found)
{
    struct describing describing = {.call = {.take = take_model}};
    honed_code code;
    *found = NULL;
    describing.model = calloc(1, sizeof *describing.model);
    if (!describing.model || !(describing.model->name = strdup(model))) {
        honed_model_free(describing.model);
        return fail_memory(&service->failure);
    }
    code = ask(service, &describing.call, about_model(service, &describing.call, "ModelMetadata", model));
    if (code)
        honed_model_free(describing.model);
    else
        *found = describing.model;
    return code;
}

void honed_model_free(honed_model *model)
{
    if (!model)
        return;
    tensors_free(&model->inputs);
    tensors_free(&model->outputs);
    free(model->name);
    free(model);
}

const char *honed_model_name(const honed_model *model)
{
    return model->name;
}

size_t honed_model_input_count(const honed_model *model)
{
    return model->inputs.count;
}

size_t honed_model_output_count(const honed_model *model)
{
    return model->outputs.count;
}

const honed_tensor *honed_model_input(const honed_model *model, size_t index)
{
    return index < model->inputs.count ? &model->inputs.of[index] : NULL;
}

const honed_tensor *honed_model_output(const honed_model *model, size_t index)
{
    return index < model->outputs.count ? &model->outputs.of[index] : NULL;
}

/* ---- Ready ---- */

struct readying {
    struct call call;
    bool ready;
};

static void take_ready(struct call *call, const struct message *message, const struct value *result)
{
    const struct value *ready = find(message, result, "ready");
    if (!ready || ready->kind != TRUTH)
        fail_nonsense(&call->failure, "neither ready nor not");
    else
        ((struct readying *)call)->ready = ready->at;
}

honed_code honed_ready(honed_service *service, const char *model, int *ready)
{
    struct readying readying = {.call = {.take = take_ready}};
    honed_code code = ask(service, &readying.call, about_model(service, &readying.call, "ModelReady", model));
    *ready = readying.ready;
    return code;
}

/* ---- All ---- */

struct listing {
    struct call call;
    honed_models *models;
};

static void take_models(struct call *call, const struct message *message, const struct value *result)
{
    honed_models *models = ((struct listing *)call)->models;
    const struct value *array = find(message, result, "models");
    size_t text = 0;
    char *to;
    if (!array || array->kind != ARRAY) {
        fail_nonsense(&call->failure, "no list of models");
        return;
    }
    for (uint32_t i = 0; i < array->size; i++)
        for (size_t field = 0; field < FIELDS; field++) {
            const struct value *value = find(message, item(message, array, i), fields[field]);
            if (!plain_text(message, value)) {
                fail_nonsense(&call->failure, "a model without what a model has");
                return;
            }
            text += value->size + 1;
        }
    models->rows = calloc(1, array->size * sizeof *models->rows + text + 1);
    if (!models->rows) {
        fail_memory(&call->failure);
        return;
    }
    models->count = array->size;
    to = (char *)(models->rows + models->count);
    for (uint32_t i = 0; i < array->size; i++)
        for (size_t field = 0; field < FIELDS; field++) {
            const struct value *value = find(message, item(message, array, i), fields[field]);
            models->rows[i][field] = to;
            if (value->size)
                memcpy(to, message->bytes + value->at, value->size);
            to += value->size + 1;
        }
}

honed_code honed_list(honed_service *service, honed_models **found)
{
    struct listing listing = {.call = {.take = take_models}};
    honed_code code;
    *found = NULL;
    listing.models = calloc(1, sizeof *listing.models);
    if (!listing.models)
        return fail_memory(&service->failure);
    code = ask(service, &listing.call, about_model(service, &listing.call, "RepositoryIndex", NULL));
    if (code)
        honed_models_free(listing.models);
    else
        *found = listing.models;
    return code;
}

void honed_models_free(honed_models *models)
{
    if (models)
        free(models->rows);
    free(models);
}

size_t honed_models_count(const honed_models *models)
{
    return models->count;
}

static const char *row(const honed_models *models, size_t index, int field)
{
    return index < models->count ? models->rows[index][field] : "";
}

const char *honed_models_name(const honed_models *models, size_t index)
{
    return row(models, index, NAME);
}

const char *honed_models_state(const honed_models *models, size_t index)
{
    return row(models, index, STATE);
}

const char *honed_models_reason(const honed_models *models, size_t index)
{
    return row(models, index, REASON);
}

const char *honed_models_engine(const honed_models *models, size_t index)
{
    return row(models, index, ENGINE);
}
