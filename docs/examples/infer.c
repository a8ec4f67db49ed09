/*
 * Runs a model of honed once: the whole client in one file of C, with nothing but the C library.
 *
 *   cc -O2 -o infer infer.c
 *   ./infer MODEL INPUT=FILE... > OUTPUTS
 *
 * Each FILE holds the bytes of one input: its elements, little-endian, row-major. The bytes of all outputs
 * go to standard output in the order of the model; names, types and shapes of both to standard error.
 * Exit status: 0 done, 1 failed, 2 used wrongly.
 *
 * It keeps to ../protocol.md. It is for little-endian machines, as tensors travel in that order.
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { MAX_TENSORS = 64, MAX_DIMS = 16, MAX_NAME = 256, MAX_DEPTH = 16 };
#define MAX_BYTES (64u << 20) /* of a message; larger tensors go through shared memory */

struct tensor {
    char name[MAX_NAME], datatype[16];
    uint64_t shape[MAX_DIMS];
    size_t dims, nbytes;
    unsigned char *data;
};

struct tensors {
    size_t count;
    struct tensor of[MAX_TENSORS];
};

static FILE *in, *out; /* the connection; two, as C wants reading and writing kept apart */

static void fail(const char *form, ...)
{
    va_list values;
    va_start(values, form);
    fputs("infer: ", stderr);
    vfprintf(stderr, form, values);
    fputc('\n', stderr);
    va_end(values);
    exit(1);
}

static void *allocate(size_t size)
{
    void *memory = malloc(size ? size : 1);
    if (!memory)
        fail("there is no memory for %zu bytes; close something and try again", size);
    return memory;
}

/* ---- MessagePack, written: a first byte says type and size, numbers are big-endian ---- */

static void put(const void *data, size_t size)
{
    if (fwrite(data, 1, size, out) != size)
        fail("the service went away (%s); call again when it runs", strerror(errno));
}

static void put_head(int code, uint64_t value, int size)
{
    unsigned char bytes[9] = {(unsigned char)code};
    for (int i = 0; i < size; i++)
        bytes[1 + i] = (unsigned char)(value >> (8 * (size - 1 - i)));
    put(bytes, 1 + (size_t)size);
}

static void put_uint(uint64_t value) { put_head(0xcf, value, 8); }
static void put_map(size_t pairs) { put_head(0xdf, pairs, 4); }

/* The array around a message must have the short form; the others may. */
static void put_array(size_t count)
{
    if (count < 16)
        put_head(0x90 | (int)count, 0, 0);
    else
        put_head(0xdd, count, 4);
}

static void put_text(const char *text)
{
    put_head(0xdb, strlen(text), 4);
    put(text, strlen(text));
}

static void put_bytes(const void *data, size_t size)
{
    put_head(0xc6, size, 4);
    put(data, size);
}

/* ---- MessagePack, read ---- */

enum kind { NIL, NUMBER, TEXT, BYTES, ARRAY, MAP };

struct value { /* what stands before the content */
    enum kind kind;
    uint64_t size; /* bytes, values or pairs that follow; a NUMBER itself where it is whole, not negative */
};

static void get(void *data, size_t size)
{
    if (fread(data, 1, size, in) != size)
        fail("the service closed the connection; call again, and read its log if that does not help");
}

static uint64_t get_number(size_t size)
{
    unsigned char bytes[8];
    uint64_t value = 0;
    get(bytes, size);
    for (size_t i = 0; i < size; i++)
        value = value << 8 | bytes[i];
    return value;
}

static struct value get_value(void)
{
    unsigned char code;
    get(&code, 1);
    if (code <= 0x7f)
        return (struct value){NUMBER, code};
    if (code <= 0x8f)
        return (struct value){MAP, code & 0x0f};
    if (code <= 0x9f)
        return (struct value){ARRAY, code & 0x0f};
    if (code <= 0xbf)
        return (struct value){TEXT, code & 0x1f};
    if (code >= 0xe0)
        return (struct value){NUMBER, 0}; /* negative */
    switch (code) { /* where several are named, the content's size doubles from one to the next */
    case 0xc0:
        return (struct value){NIL, 0};
    case 0xc2: case 0xc3:
        return (struct value){NUMBER, code & 1u};
    case 0xc4: case 0xc5: case 0xc6:
        return (struct value){BYTES, get_number((size_t)1 << (code - 0xc4))};
    case 0xca: case 0xcb: /* a float */
        get_number((size_t)4 << (code - 0xca));
        return (struct value){NUMBER, 0};
    case 0xcc: case 0xcd: case 0xce: case 0xcf:
        return (struct value){NUMBER, get_number((size_t)1 << (code - 0xcc))};
    case 0xd0: case 0xd1: case 0xd2: case 0xd3: /* with a sign */
        get_number((size_t)1 << (code - 0xd0));
        return (struct value){NUMBER, 0};
    case 0xd9: case 0xda: case 0xdb:
        return (struct value){TEXT, get_number((size_t)1 << (code - 0xd9))};
    case 0xdc: case 0xdd:
        return (struct value){ARRAY, get_number((size_t)2 << (code - 0xdc))};
    case 0xde: case 0xdf:
        return (struct value){MAP, get_number((size_t)2 << (code - 0xde))};
    default:
        fail("the service answered what is not MessagePack; compare versions");
        return (struct value){NIL, 0};
    }
}

static uint64_t expect(enum kind kind)
{
    struct value value = get_value();
    if (value.kind != kind || value.size > (kind == NUMBER ? UINT64_MAX : MAX_BYTES))
        fail("the service answered something else than protocol.md says; compare versions");
    return value.size;
}

static void get_text(char *text, size_t room)
{
    uint64_t size = expect(TEXT);
    if (size >= room)
        fail("the service answered a text that is too long for this program");
    get(text, size);
    text[size] = 0;
}

static void skip(int depth)
{
    struct value value = get_value();
    char rest[4096];
    if (depth > MAX_DEPTH)
        fail("the service answered values nested too deep; compare versions");
    if (value.kind == TEXT || value.kind == BYTES)
        for (uint64_t left = value.size; left;) {
            size_t part = left < sizeof rest ? left : sizeof rest;
            get(rest, part);
            left -= part;
        }
    else if (value.kind == ARRAY || value.kind == MAP)
        for (uint64_t i = value.size * (value.kind == MAP ? 2 : 1); i; i--)
            skip(depth + 1);
}

/* ---- The service ---- */

static void connect_to(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int made = socket(AF_UNIX, SOCK_STREAM, 0);
    if (strlen(path) >= sizeof address.sun_path)
        fail("%s is too long for a socket", path);
    strcpy(address.sun_path, path);
    if (made < 0 || connect(made, (struct sockaddr *)&address, sizeof address))
        fail("no service answers at %s (%s); start it with 'systemctl start honed'", path, strerror(errno));
    in = fdopen(made, "rb");
    out = fdopen(dup(made), "wb");
    if (!in || !out)
        fail("the connection cannot be used (%s)", strerror(errno));
}

/* A request is [0, number, method, [parameters]]; the parameters follow. */
static void begin_request(unsigned number, const char *method)
{
    put_array(4);
    put_uint(0);
    put_uint(number);
    put_text(method);
    put_array(1);
}

static void read_error(uint64_t pairs)
{
    char key[MAX_NAME], code[MAX_NAME] = "", message[4096] = "";
    while (pairs--) {
        get_text(key, sizeof key);
        if (!strcmp(key, "code"))
            get_text(code, sizeof code);
        else if (!strcmp(key, "message"))
            get_text(message, sizeof message);
        else
            skip(0);
    }
    fail("%s: %s", code, message);
}

/* Ends the request; reads its answer, [1, number, error, result], up to the pairs of the result. */
static uint64_t answer(unsigned number)
{
    if (fflush(out))
        fail("the service went away (%s); call again when it runs", strerror(errno));
    for (;;) {
        char method[MAX_NAME];
        uint64_t count = expect(ARRAY);
        uint64_t type = expect(NUMBER);
        if (type == 1 && count == 4) {
            if (expect(NUMBER) != number)
                fail("the service answered a request that was not sent; compare versions");
            struct value error = get_value();
            if (error.kind == MAP)
                read_error(error.size);
            if (error.kind != NIL)
                fail("the service answered something else than protocol.md says; compare versions");
            return expect(MAP);
        }
        if (type != 2 || count != 3)
            fail("the service answered something else than protocol.md says; compare versions");
        get_text(method, sizeof method); /* a notification, [2, method, [parameters]] */
        if (!strcmp(method, "Error") && expect(ARRAY) == 1)
            read_error(expect(MAP));
        skip(0);
    }
}

static size_t element_bytes(const char *datatype)
{
    static const struct { const char *name; size_t size; } types[] = {
        {"BOOL", 1}, {"UINT8", 1}, {"INT8", 1}, {"UINT16", 2}, {"INT16", 2}, {"FP16", 2}, {"UINT32", 4},
        {"INT32", 4}, {"FP32", 4}, {"UINT64", 8}, {"INT64", 8}, {"FP64", 8},
    };
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (!strcmp(types[i].name, datatype))
            return types[i].size;
    fail("the service answered the unknown type %s; compare versions", datatype);
    return 0;
}

/* Reads [{"name", "datatype", "shape", ...}, ...]. */
static void read_tensors(struct tensors *into)
{
    char key[MAX_NAME];
    into->count = expect(ARRAY);
    if (into->count > MAX_TENSORS)
        fail("the model has more than %d tensors; raise MAX_TENSORS", MAX_TENSORS);
    for (size_t i = 0; i < into->count; i++) {
        struct tensor *tensor = &into->of[i];
        for (uint64_t pairs = expect(MAP); pairs; pairs--) {
            get_text(key, sizeof key);
            if (!strcmp(key, "name"))
                get_text(tensor->name, sizeof tensor->name);
            else if (!strcmp(key, "datatype"))
                get_text(tensor->datatype, sizeof tensor->datatype);
            else if (!strcmp(key, "shape")) {
                tensor->dims = expect(ARRAY);
                if (tensor->dims > MAX_DIMS)
                    fail("%s has more than %d dimensions; raise MAX_DIMS", tensor->name, MAX_DIMS);
                for (size_t d = 0; d < tensor->dims; d++)
                    tensor->shape[d] = expect(NUMBER);
            } else
                skip(0);
        }
        tensor->nbytes = element_bytes(tensor->datatype);
        for (size_t d = 0; d < tensor->dims; d++) {
            if (tensor->shape[d] && tensor->nbytes > MAX_BYTES / tensor->shape[d])
                fail("%s is too large for a message; send it through shared memory", tensor->name);
            tensor->nbytes *= tensor->shape[d];
        }
    }
}

static void show(const char *what, const struct tensor *tensor)
{
    fprintf(stderr, "%s %s: %s [", what, tensor->name, tensor->datatype);
    for (size_t d = 0; d < tensor->dims; d++)
        fprintf(stderr, "%s%llu", d ? ", " : "", (unsigned long long)tensor->shape[d]);
    fputs("]\n", stderr);
}

static void ask_for_inputs(const char *model, struct tensors *inputs)
{
    char key[MAX_NAME];
    begin_request(1, "ModelMetadata");
    put_map(1);
    put_text("name");
    put_text(model);
    for (uint64_t pairs = answer(1); pairs; pairs--) {
        get_text(key, sizeof key);
        if (!strcmp(key, "inputs"))
            read_tensors(inputs);
        else
            skip(0);
    }
}

static void send_inputs(const char *model, const struct tensors *inputs)
{
    begin_request(2, "ModelInfer");
    put_map(3);
    put_text("model_name");
    put_text(model);
    put_text("inputs");
    put_array(inputs->count);
    for (size_t i = 0; i < inputs->count; i++) {
        const struct tensor *tensor = &inputs->of[i];
        put_map(3);
        put_text("name");
        put_text(tensor->name);
        put_text("datatype");
        put_text(tensor->datatype);
        put_text("shape");
        put_array(tensor->dims);
        for (size_t d = 0; d < tensor->dims; d++)
            put_uint(tensor->shape[d]);
    }
    put_text("raw_input_contents");
    put_array(inputs->count);
    for (size_t i = 0; i < inputs->count; i++)
        put_bytes(inputs->of[i].data, inputs->of[i].nbytes);
}

static void read_outputs(struct tensors *outputs)
{
    char key[MAX_NAME];
    unsigned char *data[MAX_TENSORS] = {0};
    uint64_t sizes[MAX_TENSORS] = {0}, contents = 0;
    for (uint64_t pairs = answer(2); pairs; pairs--) {
        get_text(key, sizeof key);
        if (!strcmp(key, "outputs"))
            read_tensors(outputs);
        else if (!strcmp(key, "raw_output_contents") && !contents) {
            contents = expect(ARRAY);
            if (contents > MAX_TENSORS)
                fail("the service answered more than %d outputs; raise MAX_TENSORS", MAX_TENSORS);
            for (uint64_t i = 0; i < contents; i++) {
                sizes[i] = expect(BYTES);
                data[i] = allocate(sizes[i]);
                get(data[i], sizes[i]);
            }
        } else
            skip(0);
    }
    if (contents != outputs->count)
        fail("the service answered another number of contents than of outputs; compare versions");
    for (size_t i = 0; i < contents; i++) {
        outputs->of[i].data = data[i];
        if (outputs->of[i].nbytes != sizes[i])
            fail("the service answered %s in another size; compare versions", outputs->of[i].name);
    }
}

/* ---- The command line ---- */

static void read_file(struct tensor *tensor, const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        fail("%s cannot be opened (%s)", path, strerror(errno));
    if (!tensor->data)
        tensor->data = allocate(tensor->nbytes);
    if (fread(tensor->data, 1, tensor->nbytes, file) != tensor->nbytes || fgetc(file) != EOF)
        fail("%s does not hold the %zu bytes that %s takes", path, tensor->nbytes, tensor->name);
    fclose(file);
}

static void read_files(struct tensors *inputs, char **arguments)
{
    for (; *arguments; arguments++) {
        char *equals = strchr(*arguments, '=');
        size_t i = 0;
        if (equals)
            *equals = 0;
        while (i < inputs->count && strcmp(inputs->of[i].name, *arguments))
            i++;
        if (!equals || i == inputs->count)
            fail("%s: give INPUT=FILE with an input of the model", *arguments);
        read_file(&inputs->of[i], equals + 1);
    }
    for (const struct tensor *input = inputs->of; input < inputs->of + inputs->count; input++)
        if (!input->data)
            fail("the model needs %s, %zu bytes; give %s=FILE", input->name, input->nbytes, input->name);
}

/* As protocol.md says: $HONED_SOCKET, else the system's service if there is one, else this user's. */
static const char *socket_path(void)
{
    static char own[4096];
    const char *given = getenv("HONED_SOCKET"), *folder = getenv("XDG_RUNTIME_DIR");
    if (given && *given)
        return given;
    if (!folder || !*folder || access("/run/honed/honed.sock", F_OK) == 0)
        return "/run/honed/honed.sock";
    snprintf(own, sizeof own, "%s/honed/honed.sock", folder);
    return own;
}

int main(int argc, char **argv)
{
    static struct tensors inputs, outputs;
    if (argc < 2) {
        fputs("usage: infer MODEL INPUT=FILE... > OUTPUTS\n", stderr);
        return 2;
    }
    signal(SIGPIPE, SIG_IGN); /* a service that goes away is an error, not the end */
    connect_to(socket_path());
    ask_for_inputs(argv[1], &inputs);
    for (size_t i = 0; i < inputs.count; i++)
        show("input", &inputs.of[i]);
    read_files(&inputs, argv + 2);
    send_inputs(argv[1], &inputs);
    read_outputs(&outputs);
    for (size_t i = 0; i < outputs.count; i++) {
        show("output", &outputs.of[i]);
        if (fwrite(outputs.of[i].data, 1, outputs.of[i].nbytes, stdout) != outputs.of[i].nbytes)
            fail("the outputs cannot be written (%s)", strerror(errno));
        free(outputs.of[i].data);
    }
    for (size_t i = 0; i < inputs.count; i++)
        free(inputs.of[i].data);
    fclose(in);
    fclose(out);
    if (fflush(stdout))
        fail("the outputs cannot be written (%s)", strerror(errno));
    return 0;
}
