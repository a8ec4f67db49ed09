/* Messages to the service, written by msgpack-c's packer. */
#include <stdlib.h>
#include <string.h>

#include <msgpack/pack.h>

#include "internal.h"

struct frame *frame_new(size_t room)
{
    struct frame *frame = calloc(1, sizeof *frame);
    if (!frame)
        return NULL;
    frame->room = room;
    frame->references = 1;
    frame->bytes = malloc(room);
    if (!frame->bytes) {
        free(frame);
        return NULL;
    }
    return frame;
}

void frame_keep(struct frame *frame)
{
    frame->references++;
}

void frame_free(struct frame *frame)
{
    if (!frame || --frame->references)
        return;
    free(frame->bytes);
    free(frame);
}

static int write_to_frame(void *data, const char *bytes, size_t size)
{
    struct frame *frame = data;
    if (frame->room - frame->size < size) {
        size_t room = (frame->size + size) * 2;
        char *larger = realloc(frame->bytes, room);
        if (!larger) {
            frame->failed = true;
            return -1;
        }
        frame->bytes = larger;
        frame->room = room;
    }
    if (size)
        memcpy(frame->bytes + frame->size, bytes, size);
    frame->size += size;
    return 0;
}

static msgpack_packer packer(struct frame *frame)
{
    msgpack_packer made;
    msgpack_packer_init(&made, frame, write_to_frame);
    return made;
}

void put_map(struct frame *frame, size_t pairs)
{
    msgpack_packer to = packer(frame);
    msgpack_pack_map(&to, pairs);
}

void put_array(struct frame *frame, size_t count)
{
    msgpack_packer to = packer(frame);
    msgpack_pack_array(&to, count);
}

void put_text(struct frame *frame, const char *text)
{
    msgpack_packer to = packer(frame);
    msgpack_pack_str(&to, strlen(text));
    msgpack_pack_str_body(&to, text, strlen(text));
}

void put_uint(struct frame *frame, uint64_t value)
{
    msgpack_packer to = packer(frame);
    msgpack_pack_uint64(&to, value);
}

void put_int(struct frame *frame, int64_t value)
{
    msgpack_packer to = packer(frame);
    msgpack_pack_int64(&to, value);
}

void put_bool(struct frame *frame, bool value)
{
    msgpack_packer to = packer(frame);
    if (value)
        msgpack_pack_true(&to);
    else
        msgpack_pack_false(&to);
}

void put_bytes(struct frame *frame, const void *data, size_t size)
{
    msgpack_packer to = packer(frame);
    if (size > UINT32_MAX) {
        frame->failed = true; /* no message holds it; request.c refuses it before */
        return;
    }
    msgpack_pack_bin(&to, size);
    msgpack_pack_bin_body(&to, data, size);
}

void put_packed(struct frame *frame, const void *data, size_t size)
{
    write_to_frame(frame, data, size);
}

/* The parameters, one map, follow. */
void put_request(struct frame *frame, uint32_t msgid, const char *method)
{
    put_array(frame, 4);
    put_uint(frame, 0);
    put_uint(frame, msgid);
    put_text(frame, method);
    put_array(frame, 1);
}

void put_notification(struct frame *frame, const char *method)
{
    put_array(frame, 3);
    put_uint(frame, 2);
    put_text(frame, method);
    put_array(frame, 1);
}
