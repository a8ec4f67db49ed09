/*
 * Runs a model of honed once.
 *
 *   cc -O2 -o infer infer.c $(pkg-config --cflags --libs honed)
 *   ./infer MODEL INPUT=FILE... > OUTPUTS
 *
 * Each FILE holds the bytes of one input: its elements, little-endian, row-major. The bytes of all outputs go to standard
 * output in the order of the model; names, types and shapes of both to standard error. Exit status: 0 done, 1 failed, 2 used wrongly.
 */
#include <honed.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void need(int good, const char *what, const char *why)
{
    if (!good) {
        fprintf(stderr, "infer: %s%s\n", what, why);
        exit(1);
    }
}

static void show(const char *what, const honed_tensor *tensor)
{
    fprintf(stderr, "%s %s: %s [", what, honed_tensor_name(tensor), honed_type_name(honed_tensor_type(tensor)));
    for (size_t i = 0; i < honed_tensor_rank(tensor); i++)
        fprintf(stderr, "%s%" PRId64, i ? ", " : "", honed_tensor_shape(tensor)[i]);
    fputs("]\n", stderr);
}

/* The content of the file that is given for a tensor, which is to have exactly its bytes. */
static void *read_input(const honed_tensor *tensor, char **given)
{
    const char *name = honed_tensor_name(tensor);
    while (*given && (strncmp(*given, name, strlen(name)) || (*given)[strlen(name)] != '='))
        given++;
    need(*given != NULL, "the model needs an input; give NAME=FILE for ", name);
    size_t bytes = (size_t)honed_tensor_bytes(tensor);
    char *data = malloc(bytes + 1);
    FILE *file = fopen(*given + strlen(name) + 1, "rb");
    need(file && data, *given, " cannot be opened");
    need(fread(data, 1, bytes + 1, file) == bytes, *given, " has another size than the input");
    fclose(file);
    return data;
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return fputs("usage: infer MODEL INPUT=FILE... > OUTPUTS\n", stderr), 2;
    honed_service *service = honed_service_new(NULL);
    honed_model *model = NULL;
    need(service != NULL, "no memory", "");
    need(honed_describe(service, argv[1], &model) == HONED_OK, "", honed_service_error(service));
    honed_request *request = honed_request_new(service, argv[1]);
    size_t count = honed_model_input_count(model);
    void **data = calloc(count + 1, sizeof *data);
    need(request && data, "no memory", "");
    for (size_t i = 0; i < count; i++) {
        const honed_tensor *input = honed_model_input(model, i);
        show("input", input);
        need(honed_tensor_bytes(input) >= 0, honed_tensor_name(input), " has open sizes; use honed_request_input for such");
        data[i] = read_input(input, argv + 2);
        need(honed_request_input_like(request, input, data[i]) == HONED_OK, "", honed_request_error(request));
    }
    need(honed_infer(request) == HONED_OK, "", honed_request_error(request));
    for (size_t i = 0; i < honed_request_output_count(request); i++) {
        const honed_tensor *output = honed_request_output(request, i);
        size_t bytes = (size_t)honed_tensor_bytes(output);
        show("output", output);
        need(fwrite(honed_tensor_data(output), 1, bytes, stdout) == bytes, "the outputs cannot be written", "");
    }
    for (size_t i = 0; i < count; i++)
        free(data[i]);
    free(data);
    honed_request_free(request);
    honed_model_free(model);
    honed_service_free(service);
    return fflush(stdout) ? 1 : 0;
}
