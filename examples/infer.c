/*
 * Runs a model of honed once: cc -O2 -o infer infer.c $(pkg-config --cflags --libs honed)
 *
 *   ./infer MODEL INPUT=FILE... > OUTPUTS
 *
 * Each FILE holds the bytes of one input, little-endian and row-major, and so does OUTPUTS those of all outputs, one after
 * the other. Names, types and shapes go to standard error. Exit status: 0 done, 1 failed, 2 used wrongly.
 */
#include <honed.h>
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
        fprintf(stderr, "%s%lld", i ? ", " : "", (long long)honed_tensor_shape(tensor)[i]);
    fputs("]\n", stderr);
}

/* The content of the file that is given for an input, which must have exactly its bytes. */
static void *content_for(const honed_tensor *input, char **given)
{
    const char *name = honed_tensor_name(input);
    size_t length = strlen(name), bytes = (size_t)honed_tensor_bytes(input);
    while (*given && (strncmp(*given, name, length) || (*given)[length] != '='))
        given++;
    need(*given != NULL, "give INPUT=FILE for the model's ", name);
    FILE *file = fopen(*given + length + 1, "rb");
    char *data = malloc(bytes + 1);
    need(file && data, *given, ": cannot be opened");
    need(fread(data, 1, bytes + 1, file) == bytes, *given, ": has another size than the input");
    fclose(file);
    return data;
}

int main(int argc, char **argv)
{
    honed_model *model;
    if (argc < 2)
        return fputs("usage: infer MODEL INPUT=FILE... > OUTPUTS\n", stderr), 2;
    honed_service *service = honed_service_new(NULL);
    need(honed_describe(service, argv[1], &model) == HONED_OK, "", honed_service_error(service));
    honed_request *request = honed_request_new(service, argv[1]);
    size_t count = honed_model_input_count(model);
    void **data = calloc(count + 1, sizeof *data);
    for (size_t i = 0; i < count; i++) {
        const honed_tensor *input = honed_model_input(model, i);
        show("input", input);
        data[i] = honed_tensor_bytes(input) < 0 ? NULL : content_for(input, argv + 2);
        need(honed_request_input_like(request, input, data[i]) == HONED_OK, "", honed_request_error(request));
    }
    need(honed_infer(request) == HONED_OK, "", honed_request_error(request));
    for (size_t i = 0; i < honed_request_output_count(request); i++) {
        const honed_tensor *output = honed_request_output(request, i);
        show("output", output);
        fwrite(honed_tensor_data(output), 1, (size_t)honed_tensor_bytes(output), stdout);
    }
    need(fflush(stdout) == 0, "the outputs cannot be written", "");
    while (count)
        free(data[--count]);
    free(data);
    honed_request_free(request);
    honed_model_free(model);
    honed_service_free(service);
}
