/* Codes, and the sentences that go with them. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "internal.h"

#ifndef HONED_LIBRARY_VERSION
#error "the Makefile gives HONED_LIBRARY_VERSION"
#endif

const char *honed_version(void)
{
    return HONED_LIBRARY_VERSION;
}

static const struct {
    honed_code code;
    const char *name;
} codes[] = {
    {HONED_OK, "OK"},
    {HONED_INVALID_ARGUMENT, "INVALID_ARGUMENT"},
    {HONED_FAILED_PRECONDITION, "FAILED_PRECONDITION"},
    {HONED_NOT_FOUND, "NOT_FOUND"},
    {HONED_ALREADY_EXISTS, "ALREADY_EXISTS"},
    {HONED_PERMISSION_DENIED, "PERMISSION_DENIED"},
    {HONED_DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"},
    {HONED_CANCELLED, "CANCELLED"},
    {HONED_RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED"},
    {HONED_UNIMPLEMENTED, "UNIMPLEMENTED"},
    {HONED_UNAVAILABLE, "UNAVAILABLE"},
    {HONED_INTERNAL, "INTERNAL"},
    {HONED_SEQUENCE_LOST, "SEQUENCE_LOST"},
    {HONED_DISCONNECTED, "DISCONNECTED"},
    {HONED_NO_MEMORY, "NO_MEMORY"},
};

const char *honed_code_name(honed_code code)
{
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++)
        if (codes[i].code == code)
            return codes[i].name;
    return "INTERNAL";
}

int honed_code_passes(honed_code code)
{
    return code == HONED_UNAVAILABLE || code == HONED_DISCONNECTED || code == HONED_RESOURCE_EXHAUSTED;
}

void succeed(struct failure *failure)
{
    failure->code = HONED_OK;
    failure->text[0] = 0;
}

honed_code fail(struct failure *failure, honed_code code, const char *form, ...)
{
    va_list values;
    va_start(values, form);
    failure->code = code;
    if (vsnprintf(failure->text, sizeof failure->text, form, values) < 0)
        failure->text[0] = 0;
    va_end(values);
    return code;
}

honed_code fail_memory(struct failure *failure)
{
    return fail(failure, HONED_NO_MEMORY, "this process has no memory left for it; free something and try again");
}

honed_code fail_nonsense(struct failure *failure, const char *what)
{
    return fail(failure, HONED_INTERNAL, "the service's answer makes no sense (%s); compare versions", what);
}

/* The beginning of a text, on one line, without half a character of UTF-8 at its end. */
static void copy_sentence(char *into, size_t room, const struct message *message, const struct value *text)
{
    size_t size = text->size < room ? text->size : room - 1;
    if (size < text->size)
        while (size && (message->bytes[text->at + size] & 0xc0) == 0x80)
            size--;
    for (size_t i = 0; i < size; i++) {
        unsigned char byte = message->bytes[text->at + i];
        into[i] = byte < 0x20 || byte == 0x7f ? ' ' : (char)byte;
    }
    into[size] = 0;
}

honed_code fail_as_told(struct failure *failure, const struct message *message, const struct value *error)
{
    const struct value *code = find(message, error, "code"), *text = find(message, error, "message");
    failure->code = HONED_INTERNAL; /* and where the code is one that this library does not know */
    for (size_t i = 1; i < sizeof codes / sizeof *codes; i++)
        if (codes[i].code < HONED_SEQUENCE_LOST && is_text(message, code, codes[i].name))
            failure->code = codes[i].code;
    if (is_text(message, find(message, error, "type"), "SequenceLost"))
        failure->code = HONED_SEQUENCE_LOST;
    if (text && text->kind == TEXT && text->size)
        copy_sentence(failure->text, sizeof failure->text, message, text);
    else
        fail_nonsense(failure, "an error without a message");
    return failure->code;
}
