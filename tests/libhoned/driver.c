/*
 * Uses every function of libhoned, as an app would; for sanitizers, Valgrind, and services that lie.
 *
 *   driver every SOCKET ROUNDS      everything, whatever is answered; prints how often each code came
 *   driver load SOCKET COUNT        so many inferences of "small" that must be right, 8 on their way; prints memory on the way
 *   driver bring SOCKET FILE        a file of one's own; prints its model's name
 *
 * The model is y = x + [0, 1, ...] + 1 with 8 elements.
 */
#include <honed.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SIZE = 8, AT_ONCE = 8, BYTES = SIZE * 4, TIMEOUT = 60000 };
static const int64_t shape[] = {SIZE};
static unsigned long codes[32];

static honed_code note(honed_code code, const char *text)
{
    codes[code]++;
    if ((code == HONED_OK) != (text[0] == 0)) {
        fprintf(stderr, "%s comes with '%s'\n", honed_code_name(code), text);
        exit(3);
    }
    return code;
}

static void must(int good, const char *what)
{
    if (!good) {
        fprintf(stderr, "driver: %s\n", what);
        exit(3);
    }
}

/* Reads all of it, so that a checker sees what cannot be read. */
static unsigned long touch(const honed_tensor *tensor)
{
    unsigned long sum = strlen(honed_tensor_name(tensor)) + strlen(honed_type_name(honed_tensor_type(tensor)));
    const unsigned char *data = honed_tensor_data(tensor);
    for (size_t i = 0; i < honed_tensor_rank(tensor); i++)
        sum += (unsigned long)honed_tensor_shape(tensor)[i];
    for (int64_t i = 0; data && i < honed_tensor_bytes(tensor); i++)
        sum += data[i];
    return sum;
}

static unsigned long touch_outputs(const honed_request *request)
{
    unsigned long sum = strlen(honed_request_engine(request));
    for (size_t i = 0; i < honed_request_output_count(request); i++)
        sum += touch(honed_request_output(request, i));
    sum += honed_request_output_named(request, "y") != NULL;
    return sum + honed_request_queue_us(request) + honed_request_compute_us(request);
}

static unsigned long look_around(honed_service *service)
{
    unsigned long sum = 0;
    honed_model *model;
    honed_models *models;
    int ready;
    if (!note(honed_describe(service, "small", &model), honed_service_error(service))) {
        for (size_t i = 0; i < honed_model_input_count(model); i++)
            sum += touch(honed_model_input(model, i));
        for (size_t i = 0; i < honed_model_output_count(model); i++)
            sum += touch(honed_model_output(model, i));
    }
    honed_model_free(model);
    if (!note(honed_list(service, &models), honed_service_error(service)))
        for (size_t i = 0; i < honed_models_count(models); i++)
            sum += strlen(honed_models_name(models, i)) + strlen(honed_models_state(models, i)) +
                   strlen(honed_models_reason(models, i)) + strlen(honed_models_engine(models, i));
    honed_models_free(models);
    note(honed_ready(service, "small", &ready), honed_service_error(service));
    return sum;
}

static unsigned long infer_once(honed_service *service, honed_buffer *buffer)
{
    float x[SIZE] = {1, 2, 3};
    honed_request *request = honed_request_new(service, "small");
    unsigned long sum;
    must(request != NULL, "no request");
    must(!honed_request_input(request, "x", HONED_FP32, shape, 1, x), "the input is refused");
    note(honed_infer(request), honed_request_error(request));
    sum = touch_outputs(request);
    if (buffer) {
        honed_request_clear(request);
        must(!honed_request_input_shared(request, "x", HONED_FP32, shape, 1, buffer, 0), "the shared input is refused");
        must(!honed_request_want_shared(request, "y", buffer, BYTES, BYTES), "the shared output is refused");
        note(honed_infer(request), honed_request_error(request));
        sum += touch_outputs(request);
    }
    honed_request_free(request);
    return sum;
}

static unsigned long infer_several(honed_service *service, honed_buffer *buffer)
{
    float x[SIZE] = {1, 2, 3};
    honed_request *requests[4], *ended;
    unsigned long sum = 0;
    size_t waiting = 0;
    for (size_t i = 0; i < 4; i++) {
        must((requests[i] = honed_request_new(service, "small")) != NULL, "no request");
        must(!honed_request_input(requests[i], "x", HONED_FP32, shape, 1, x), "the input is refused");
        if (i == 2 && buffer)
            must(!honed_request_want_shared(requests[i], "y", buffer, BYTES, BYTES), "the shared output is refused");
        if (honed_submit(requests[i]) == HONED_OK)
            waiting++; /* it may have ended already; that is told when it is collected */
        else
            note(honed_request_code(requests[i]), honed_request_error(requests[i]));
    }
    honed_request_cancel(requests[3]);
    while (waiting && (ended = honed_collect(service, TIMEOUT))) {
        note(honed_request_code(ended), honed_request_error(ended));
        sum += touch_outputs(ended);
        waiting--;
    }
    must(!waiting, "a request was never collected");
    for (size_t i = 0; i < 4; i++)
        honed_request_free(requests[i]);
    return sum;
}

static void every(const char *path, unsigned long rounds)
{
    unsigned long sum = 0;
    while (rounds--) {
        honed_service *service = honed_service_new(path);
        honed_buffer *buffer = NULL;
        must(service != NULL, "no service");
        honed_service_timeout(service, TIMEOUT);
        note(honed_buffer_new(service, 4096, &buffer), honed_service_error(service));
        sum += look_around(service);
        sum += infer_once(service, buffer);
        sum += infer_several(service, buffer);
        if (rounds % 2) /* in any order */
            honed_buffer_free(buffer);
        honed_service_free(service);
        if (rounds % 2 == 0)
            honed_buffer_free(buffer);
    }
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (codes[i])
            printf("%s %lu\n", honed_code_name((honed_code)i), codes[i]);
    fprintf(stderr, "%lu\n", sum); /* so that nothing of it is left out */
}

/* ---- Load ---- */

struct slot {
    honed_request *request;
    float x[SIZE];
    float *shared; /* x and y, one behind the other; NULL where they are sent */
};

static long of_process(const char *field)
{
    char line[256];
    long value = -1;
    FILE *file = fopen("/proc/self/status", "r");
    must(file != NULL, "no /proc");
    while (fgets(line, sizeof line, file))
        if (!strncmp(line, field, strlen(field)))
            value = strtol(line + strlen(field), NULL, 10);
    fclose(file);
    return value;
}

static void send_next(struct slot *slot, unsigned long number)
{
    for (size_t i = 0; i < SIZE; i++)
        (slot->shared ? slot->shared : slot->x)[i] = (float)(number % 1000);
    must(!honed_submit(slot->request), honed_request_error(slot->request));
}

static void take(const struct slot *slot)
{
    const float *x = slot->shared ? slot->shared : slot->x, *y;
    must(!honed_request_code(slot->request), honed_request_error(slot->request));
    must(honed_request_output_count(slot->request) == 1, "not one output");
    y = honed_tensor_data(honed_request_output(slot->request, 0));
    must(!slot->shared || y == slot->shared + SIZE, "the output is not where it was wanted");
    for (size_t i = 0; i < SIZE; i++)
        must(y[i] == x[i] + (float)i + 1, "a wrong answer");
}

static void set_up(struct slot *slot, size_t index, honed_service *service, honed_buffer *buffer)
{
    size_t at = index * 2 * BYTES;
    must((slot->request = honed_request_new(service, "small")) != NULL, "no request");
    if (index % 2) {
        slot->shared = (float *)((char *)honed_buffer_data(buffer) + at);
        must(!honed_request_input_shared(slot->request, "x", HONED_FP32, shape, 1, buffer, at), "refused");
        must(!honed_request_want_shared(slot->request, "y", buffer, at + BYTES, BYTES), "refused");
    } else {
        must(!honed_request_input(slot->request, "x", HONED_FP32, shape, 1, slot->x), "refused");
    }
}

/* As a program with an event loop does it. */
static void load(const char *path, unsigned long count)
{
    honed_service *service = honed_service_new(path);
    honed_buffer *buffer;
    struct slot slots[AT_ONCE] = {{0}};
    unsigned long sent = 0, taken = 0, told = 0;
    must(service && !honed_buffer_new(service, AT_ONCE * 2 * BYTES, &buffer), "no service, or no buffer");
    for (size_t i = 0; i < AT_ONCE; i++) {
        set_up(&slots[i], i, service, buffer);
        if (sent < count)
            send_next(&slots[i], sent++);
    }
    while (taken < count) {
        struct pollfd waiting = {.fd = honed_service_fd(service), .events = POLLIN};
        honed_request *ended;
        must(poll(&waiting, 1, TIMEOUT) == 1, "nothing comes");
        while ((ended = honed_collect(service, 0))) {
            struct slot *slot = slots;
            while (slot->request != ended)
                slot++;
            take(slot);
            taken++;
            if (sent < count)
                send_next(slot, sent++);
            if (taken * 10 / count > told) {
                told = taken * 10 / count;
                printf("%lu %ld\n", taken, of_process("VmRSS:"));
            }
        }
    }
    for (size_t i = 0; i < AT_ONCE; i++)
        honed_request_free(slots[i].request);
    honed_buffer_free(buffer);
    honed_service_free(service);
}

/* ---- A file of one's own ---- */

static void bring(const char *path, const char *file)
{
    honed_service *service = honed_service_new(path);
    honed_model *model;
    must(honed_bring(service, file, "auto", &model) == HONED_OK, honed_service_error(service));
    honed_request *request = honed_request_new(service, honed_model_name(model));
    printf("%s %zu\n", honed_model_name(model), honed_model_input_count(model));
    honed_request_free(request);
    honed_model_free(model);
    honed_service_free(service);
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    if (!strcmp(argv[1], "every"))
        every(argv[2], strtoul(argv[3], NULL, 10));
    else if (!strcmp(argv[1], "bring"))
        bring(argv[2], argv[3]);
    else
        load(argv[2], strtoul(argv[3], NULL, 10));
    return fflush(stdout) ? 1 : 0;
}
