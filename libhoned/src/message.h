/* A MessagePack message as it comes in, byte by byte, and its values. */
#ifndef HONED_MESSAGE_H
#define HONED_MESSAGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum kind { NIL, TRUTH, NUMBER, NEGATIVE, FRACTION, TEXT, BYTES, ARRAY, MAP };

struct value {
    enum kind kind;
    uint32_t size; /* bytes of TEXT and BYTES, values of ARRAY, pairs of MAP */
    uint64_t at;   /* the NUMBER; where TEXT and BYTES begin in the message; the first of the values */
};

struct parser; /* of message.c */

struct message {
    unsigned char *bytes; /* received */
    size_t size, room;
    size_t parsed;
    struct value *values; /* those inside of containers */
    size_t count, values_room;
    struct value root;
    struct parser *parser;
};

enum progress { MESSAGE_PARTIAL, MESSAGE_WHOLE, MESSAGE_WRONG, MESSAGE_NO_MEMORY };

bool message_init(struct message *message);
void message_free(struct message *message);
void message_restart(struct message *message); /* forget everything received */
/* Room for bytes to come, behind the `size` that are there; 0 where memory is short, or the message too large. */
size_t message_reserve(struct message *message);
enum progress message_parse(struct message *message);
void message_consume(struct message *message); /* the whole one; what came behind it stays */

/* The value of a key in a map; NULL where there is none, or no map. */
const struct value *find(const struct message *message, const struct value *map, const char *key);
/* The value at an index of an array. */
const struct value *item(const struct message *message, const struct value *array, uint32_t index);
bool is_text(const struct message *message, const struct value *value, const char *text);
/* Whether it is text that C can hold: without NUL. */
bool plain_text(const struct message *message, const struct value *value);

#endif
