/*
 * MessagePack, read by the parser template of msgpack-c, into one flat array of values.
 *
 * msgpack_unpack_next would take what a header promises for what is there, and allocate it. Here a message allocates in
 * proportion to the bytes received, and at most MAX_VALUES values.
 */
#include "message.h"

#include <stdlib.h>
#include <string.h>

#include <msgpack/unpack_define.h>

enum { MAX_VALUES = 65536, FIRST_ROOM = 65536 };
static const size_t MAX_BYTES = (size_t)1 << 30;

/* What the template answers with; its own enum stands in a header that wants the library linked. */
enum { MSGPACK_UNPACK_PARSE_ERROR = -1, MSGPACK_UNPACK_NOMEM_ERROR = -2, OUT_OF_MEMORY = -3 };

typedef struct {
    struct message *message;
} reader;

#define msgpack_unpack_struct(name) struct honed_unpack##name
#define msgpack_unpack_func(ret, name) static inline ret honed_unpack##name
#define msgpack_unpack_callback(name) honed_unpack_callback##name
#define msgpack_unpack_object struct value
#define msgpack_unpack_user reader

static struct value honed_unpack_callback_root(reader *user)
{
    (void)user;
    return (struct value){NIL, 0, 0};
}

static int number(struct value *value, uint64_t given)
{
    *value = (struct value){NUMBER, 0, given};
    return 0;
}

static int sign(struct value *value, int64_t given)
{
    *value = (struct value){given < 0 ? NEGATIVE : NUMBER, 0, (uint64_t)given};
    return 0;
}

static int simple(struct value *value, enum kind kind, bool truth)
{
    *value = (struct value){kind, 0, truth};
    return 0;
}

static int honed_unpack_callback_uint8(reader *u, uint8_t d, struct value *o) { return (void)u, number(o, d); }
static int honed_unpack_callback_uint16(reader *u, uint16_t d, struct value *o) { return (void)u, number(o, d); }
static int honed_unpack_callback_uint32(reader *u, uint32_t d, struct value *o) { return (void)u, number(o, d); }
static int honed_unpack_callback_uint64(reader *u, uint64_t d, struct value *o) { return (void)u, number(o, d); }
static int honed_unpack_callback_int8(reader *u, int8_t d, struct value *o) { return (void)u, sign(o, d); }
static int honed_unpack_callback_int16(reader *u, int16_t d, struct value *o) { return (void)u, sign(o, d); }
static int honed_unpack_callback_int32(reader *u, int32_t d, struct value *o) { return (void)u, sign(o, d); }
static int honed_unpack_callback_int64(reader *u, int64_t d, struct value *o) { return (void)u, sign(o, d); }
static int honed_unpack_callback_float(reader *u, float d, struct value *o) { return (void)u, (void)d, simple(o, FRACTION, false); }
static int honed_unpack_callback_double(reader *u, double d, struct value *o) { return (void)u, (void)d, simple(o, FRACTION, false); }
static int honed_unpack_callback_nil(reader *u, struct value *o) { return (void)u, simple(o, NIL, false); }
static int honed_unpack_callback_true(reader *u, struct value *o) { return (void)u, simple(o, TRUTH, true); }
static int honed_unpack_callback_false(reader *u, struct value *o) { return (void)u, simple(o, TRUTH, false); }

static int honed_unpack_callback_ext(reader *u, const char *base, const char *p, unsigned int l, struct value *o)
{
    (void)u, (void)base, (void)p, (void)l, (void)o;
    return MSGPACK_UNPACK_PARSE_ERROR; /* the protocol has none */
}

static int content(enum kind kind, const char *base, const char *p, unsigned int size, struct value *value)
{
    *value = (struct value){kind, size, size ? (uint64_t)(p - base) : 0}; /* without bytes `p` may be NULL */
    return 0;
}

static int honed_unpack_callback_str(reader *u, const char *base, const char *p, unsigned int l, struct value *o)
{
    return (void)u, content(TEXT, base, p, l, o);
}

static int honed_unpack_callback_bin(reader *u, const char *base, const char *p, unsigned int l, struct value *o)
{
    return (void)u, content(BYTES, base, p, l, o);
}

/* Reserves the places of what a container holds, one beside the other. */
static int container(struct message *message, enum kind kind, unsigned int size, unsigned int each, struct value *value)
{
    size_t wanted;
    if (size > MAX_VALUES || message->count + (size_t)size * each > MAX_VALUES)
        return MSGPACK_UNPACK_PARSE_ERROR;
    wanted = message->count + (size_t)size * each;
    if (wanted > message->values_room) {
        size_t room = message->values_room ? message->values_room : 64;
        struct value *values;
        while (room < wanted)
            room *= 2;
        values = realloc(message->values, room * sizeof *values);
        if (!values)
            return OUT_OF_MEMORY;
        message->values = values;
        message->values_room = room;
    }
    *value = (struct value){kind, 0, message->count}; /* `size` grows as they come */
    message->count = wanted;
    return 0;
}

static int honed_unpack_callback_array(reader *u, unsigned int n, struct value *o)
{
    return container(u->message, ARRAY, n, 1, o);
}

static int honed_unpack_callback_map(reader *u, unsigned int n, struct value *o)
{
    return container(u->message, MAP, n, 2, o);
}

static int honed_unpack_callback_array_item(reader *u, struct value *c, struct value o)
{
    u->message->values[c->at + c->size++] = o;
    return 0;
}

static int honed_unpack_callback_map_item(reader *u, struct value *c, struct value k, struct value v)
{
    struct value *pair = u->message->values + c->at + 2 * (size_t)c->size++;
    pair[0] = k;
    pair[1] = v;
    return 0;
}

#include <msgpack/unpack_template.h>

struct parser {
    struct honed_unpack_context context;
};

bool message_init(struct message *message)
{
    *message = (struct message){0};
    message->parser = calloc(1, sizeof *message->parser);
    if (!message->parser)
        return false;
    message_restart(message);
    return true;
}

void message_free(struct message *message)
{
    free(message->bytes);
    free(message->values);
    free(message->parser);
    *message = (struct message){0};
}

static void begin(struct message *message)
{
    message->parsed = 0;
    message->count = 0;
    message->parser->context.user.message = message;
    honed_unpack_init(&message->parser->context);
}

void message_restart(struct message *message)
{
    message->size = 0;
    begin(message);
}

size_t message_reserve(struct message *message)
{
    if (message->room - message->size < FIRST_ROOM / 4) {
        size_t room = message->room ? message->room * 2 : FIRST_ROOM;
        unsigned char *bytes;
        if (message->size >= MAX_BYTES || !(bytes = realloc(message->bytes, room)))
            return 0;
        message->bytes = bytes;
        message->room = room;
    }
    return message->room - message->size;
}

enum progress message_parse(struct message *message)
{
    int status;
    if (message->parsed == message->size)
        return MESSAGE_PARTIAL;
    status = honed_unpack_execute(&message->parser->context, (const char *)message->bytes, message->size, &message->parsed);
    if (status == OUT_OF_MEMORY)
        return MESSAGE_NO_MEMORY;
    if (status < 0)
        return MESSAGE_WRONG;
    if (status == 0)
        return MESSAGE_PARTIAL;
    message->root = honed_unpack_data(&message->parser->context);
    return MESSAGE_WHOLE;
}

void message_consume(struct message *message)
{
    size_t used = message->parsed, left = message->size - used;
    memmove(message->bytes, message->bytes + used, left);
    message->size = left;
    begin(message);
    /* One large answer should not keep its memory for ever; large ones that come again and again should. */
    if (message->room > 16 * (size_t)FIRST_ROOM && used + left < message->room / 8) {
        size_t room = left > FIRST_ROOM ? 2 * left : FIRST_ROOM;
        unsigned char *smaller = realloc(message->bytes, room);
        if (smaller) {
            message->bytes = smaller;
            message->room = room;
        }
    }
}

const struct value *find(const struct message *message, const struct value *map, const char *key)
{
    if (!map || map->kind != MAP)
        return NULL;
    for (size_t i = 0; i < map->size; i++)
        if (is_text(message, &message->values[map->at + 2 * i], key))
            return &message->values[map->at + 2 * i + 1];
    return NULL;
}

const struct value *item(const struct message *message, const struct value *array, uint32_t index)
{
    return array && array->kind == ARRAY && index < array->size ? &message->values[array->at + index] : NULL;
}

bool is_text(const struct message *message, const struct value *value, const char *text)
{
    return value && value->kind == TEXT && value->size == strlen(text) &&
           (!value->size || memcmp(message->bytes + value->at, text, value->size) == 0);
}

bool plain_text(const struct message *message, const struct value *value)
{
    return value && value->kind == TEXT && (!value->size || !memchr(message->bytes + value->at, 0, value->size));
}
