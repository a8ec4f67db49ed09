/*
 * libhoned: run models of honed from C.
 *
 * honed is a service that runs ONNX models on the machine's GPU or processor. This library connects to its socket,
 * tells which models there are and what they take, and has them run, one request at a time or many, with tensors that
 * are copied or lie in memory shared with the service.
 *
 *     honed_service *service = honed_service_new(NULL);
 *     honed_request *request = honed_request_new(service, "squeezenet");
 *     honed_request_input(request, "image", HONED_FP32, (int64_t[]){1, 3, 224, 224}, 4, pixels);
 *     if (honed_infer(request) != HONED_OK)
 *         fprintf(stderr, "%s\n", honed_request_error(request));
 *     else
 *         use(honed_tensor_data(honed_request_output_named(request, "scores")));
 *     honed_request_free(request);
 *     honed_service_free(service);
 *
 * Rules that hold for all of it:
 *
 * - What a function gives is its result, or a honed_code; honed_service_error and honed_request_error then say in one sentence
 *   what is wrong and what to do. Text is UTF-8.
 * - A honed_service and all that was made with it belong to one thread at a time. Threads that want to work at once have one
 *   each. The library starts no thread, sets no signal handler, and writes nothing to standard output or error.
 * - The connection is made when it is needed, and made anew when the service was restarted. Requests that were on their
 *   way then end with HONED_DISCONNECTED or HONED_UNAVAILABLE, and may be sent again; honed_infer_patiently does so.
 * - Tensors are dense, row-major and little-endian, as the machines that honed runs on have them.
 * - Times are milliseconds, as those of poll: 0 does not wait, -1 sets no limit.
 * - Things may be freed in any order, and freeing NULL does nothing.
 *
 * Link with `pkg-config --cflags --libs honed`. Functions and codes may be added; none will change within libhoned.so.0.
 */
#ifndef HONED_H
#define HONED_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define HONED_API __attribute__((visibility("default")))
#define HONED_MUST_CHECK __attribute__((warn_unused_result))
#else
#define HONED_API
#define HONED_MUST_CHECK
#endif

/* A connection to the service, and what it needs to be made anew. */
typedef struct honed_service honed_service;
/* What a model takes and gives. */
typedef struct honed_model honed_model;
/* The models that there are. */
typedef struct honed_models honed_models;
/* One input or output: name, type, shape, and of an output of a request the data. */
typedef struct honed_tensor honed_tensor;
/* A call of a model, which may be made any number of times, and the outputs of its last one. */
typedef struct honed_request honed_request;
/* Memory shared with the service. */
typedef struct honed_buffer honed_buffer;

/* The result of a call. Those from 1 to 19 are the service's own. More may be added. */
typedef enum honed_code {
    HONED_OK = 0,
    HONED_INVALID_ARGUMENT = 1,    /* a mistake in the program: names, types, shapes, or a function used wrongly */
    HONED_FAILED_PRECONDITION = 2, /* the model cannot do this */
    HONED_NOT_FOUND = 3,           /* there is no such model */
    HONED_ALREADY_EXISTS = 4,
    HONED_PERMISSION_DENIED = 5,   /* this user is not in group honed */
    HONED_DEADLINE_EXCEEDED = 6,   /* it was not answered in time: drop this frame, or allow more */
    HONED_CANCELLED = 7,           /* honed_request_cancel, or honed_service_free while it ran */
    HONED_RESOURCE_EXHAUSTED = 8,  /* the queue, or memory of the service, is full: slow down, then try again */
    HONED_UNIMPLEMENTED = 9,       /* the service is older than this library */
    HONED_UNAVAILABLE = 10,        /* no service, or one that cannot answer now; the request has not run: try again */
    HONED_INTERNAL = 11,           /* a mistake in honed, or an answer that makes no sense: compare versions */
    HONED_SEQUENCE_LOST = 12,      /* the service does not know the sequence any more: begin it anew */
    HONED_DISCONNECTED = 20,       /* the service went away before it answered; the request may have run: try again */
    HONED_NO_MEMORY = 21           /* this process has no memory left for it */
} honed_code;

/* Types of elements, as the protocol names them. */
typedef enum honed_type {
    HONED_UNKNOWN = 0, /* one that this version of the library does not know */
    HONED_BOOL = 1,    /* a byte, 0 or 1 */
    HONED_UINT8 = 2,
    HONED_INT8 = 3,
    HONED_UINT16 = 4,
    HONED_INT16 = 5,
    HONED_UINT32 = 6,
    HONED_INT32 = 7,
    HONED_UINT64 = 8,
    HONED_INT64 = 9,
    HONED_FP16 = 10,
    HONED_FP32 = 11,
    HONED_FP64 = 12
} honed_type;

/* Flags of honed_request_sequence. */
enum { HONED_SEQUENCE_START = 1, HONED_SEQUENCE_END = 2, HONED_SEQUENCE_LAST_TOKEN = 4 };

/* ---- Names ---- */

/* The version of the library, as "0.2.0". */
HONED_API const char *honed_version(void);
/* A code as the protocol writes it, as "NOT_FOUND". */
HONED_API const char *honed_code_name(honed_code code);
/* 1 where the same call may succeed later without any change: UNAVAILABLE, DISCONNECTED and RESOURCE_EXHAUSTED; else 0. */
HONED_API int honed_code_passes(honed_code code);
/* A type as the protocol writes it, as "FP32"; "" for HONED_UNKNOWN. */
HONED_API const char *honed_type_name(honed_type type);
/* Bytes of one element; 0 for HONED_UNKNOWN. */
HONED_API size_t honed_type_bytes(honed_type type);

/* ---- The connection ---- */

/*
 * A connection that is not yet made. `path` is the socket's; NULL looks where honed listens: $HONED_SOCKET if set, else
 * /run/honed/honed.sock if it is there, else $XDG_RUNTIME_DIR/honed/honed.sock. NULL where memory or descriptors are short.
 */
HONED_API honed_service *honed_service_new(const char *path);
/* Ends the connection; requests on their way end with HONED_CANCELLED. What was made with it can only be freed then. */
HONED_API void honed_service_free(honed_service *service);
/*
 * Connects now, and tries again for `timeout` ms while no service answers. Calling it is not necessary, but tells early.
 * UNAVAILABLE, PERMISSION_DENIED.
 */
HONED_API HONED_MUST_CHECK honed_code honed_service_connect(honed_service *service, int timeout);
/* How long a call may take of which nothing else was said; 60,000 at first. The service itself gives a request up after a day. */
HONED_API void honed_service_timeout(honed_service *service, int timeout);
/* Why the last call failed that took this connection and no request, until the next one; "" where none did. */
HONED_API const char *honed_service_error(const honed_service *service);

/* ---- Models ---- */

/* What `model` takes and gives; free it with honed_model_free. NOT_FOUND. `*found` is NULL unless HONED_OK is returned. */
HONED_API HONED_MUST_CHECK honed_code honed_describe(honed_service *service, const char *model, honed_model **found);
HONED_API void honed_model_free(honed_model *model);
HONED_API const char *honed_model_name(const honed_model *model);
HONED_API size_t honed_model_input_count(const honed_model *model);
HONED_API size_t honed_model_output_count(const honed_model *model);
/* The input or output at `index`; NULL beyond the last. It lives as long as the model. */
HONED_API const honed_tensor *honed_model_input(const honed_model *model, size_t index);
HONED_API const honed_tensor *honed_model_output(const honed_model *model, size_t index);

/* 1 in `*ready` where requests for `model` are answered now, else 0. NOT_FOUND. */
HONED_API HONED_MUST_CHECK honed_code honed_ready(honed_service *service, const char *model, int *ready);

/* All models; free them with honed_models_free. `*found` is NULL unless HONED_OK is returned. */
HONED_API HONED_MUST_CHECK honed_code honed_list(honed_service *service, honed_models **found);
HONED_API void honed_models_free(honed_models *models);
HONED_API size_t honed_models_count(const honed_models *models);
/* Of the model at `index`, "" beyond the last: its name; "READY", "LOADING" or "UNAVAILABLE"; why, or ""; "gpu", "cpu" or "gpu+cpu". */
HONED_API const char *honed_models_name(const honed_models *models, size_t index);
HONED_API const char *honed_models_state(const honed_models *models, size_t index);
HONED_API const char *honed_models_reason(const honed_models *models, size_t index);
HONED_API const char *honed_models_engine(const honed_models *models, size_t index);

/*
 * Has the service run the ONNX file at `path`, with its external data, for this user alone. `*found` is what it takes and gives,
 * as of honed_describe, with the name for requests. Bring it each time the program starts: a file that the service has is not
 * taken again, and one that is not used for long may go. The first time takes as long as ONNX Runtime needs to load it.
 * `precision` is "auto", or "fp32" where the service may not compute in fp16. FAILED_PRECONDITION where the file cannot be read
 * or served, RESOURCE_EXHAUSTED where the user's quota is full, PERMISSION_DENIED where the service takes no models.
 */
HONED_API HONED_MUST_CHECK honed_code honed_bring(honed_service *service, const char *path, const char *precision,
                                                  honed_model **found);

/* ---- Tensors ---- */

HONED_API const char *honed_tensor_name(const honed_tensor *tensor);
HONED_API honed_type honed_tensor_type(const honed_tensor *tensor);
/* How many sizes the shape has; 0 for a scalar. */
HONED_API size_t honed_tensor_rank(const honed_tensor *tensor);
/* `rank` sizes, of which -1 is open: any will do. Only the tensors of a model have such. */
HONED_API const int64_t *honed_tensor_shape(const honed_tensor *tensor);
/* Bytes of all elements; -1 where a size is open, or the type unknown, of the tensors of a model. */
HONED_API int64_t honed_tensor_bytes(const honed_tensor *tensor);
/*
 * The elements of an output of a request, aligned to 64 bytes, or where they lie in a honed_buffer; NULL for those of a model.
 * They are there until the request is made again or freed.
 */
HONED_API const void *honed_tensor_data(const honed_tensor *tensor);

/* ---- Requests ---- */

/* A request of `model` without inputs. NULL where memory is short. */
HONED_API honed_request *honed_request_new(honed_service *service, const char *model);
/* One that is on its way is cancelled. */
HONED_API void honed_request_free(honed_request *request);

/*
 * Sets an input, by its name, for all calls that follow, in the place of what was set before. INVALID_ARGUMENT, NO_MEMORY.
 * `data` is not copied now: honed_infer and honed_submit read it, and until they do it must stay. Write the next frame to
 * the same place, and only call again.
 */
HONED_API HONED_MUST_CHECK honed_code honed_request_input(honed_request *request, const char *name, honed_type type,
                                                          const int64_t *shape, size_t rank, const void *data);
/* The same with type and shape as the model says, which must have no open size. */
HONED_API HONED_MUST_CHECK honed_code honed_request_input_like(honed_request *request, const honed_tensor *tensor,
                                                               const void *data);
/* The same for data in `buffer`, `offset` bytes into it. The service reads it while the request runs: change it after that. */
HONED_API HONED_MUST_CHECK honed_code honed_request_input_shared(honed_request *request, const char *name, honed_type type,
                                                                 const int64_t *shape, size_t rank, honed_buffer *buffer,
                                                                 size_t offset);
/* Asks for an output. Without any such call all are given; with one, those asked for, in that order. */
HONED_API HONED_MUST_CHECK honed_code honed_request_want(honed_request *request, const char *name);
/* Asks for an output, to be written by the service to `bytes` bytes of `buffer`, which must be exactly its size. */
HONED_API HONED_MUST_CHECK honed_code honed_request_want_shared(honed_request *request, const char *name,
                                                                honed_buffer *buffer, size_t offset, size_t bytes);
/* Forgets inputs, outputs asked for, and sequence; and the outputs of the last call. One on its way stays as it is. */
HONED_API void honed_request_clear(honed_request *request);

/* Until when the answer is of use, counted from the call, in ms; -1 as the connection has it. */
HONED_API void honed_request_timeout(honed_request *request, int timeout);
/* 1 first, 2 (usual), 3 last; of the requests of one user. */
HONED_API void honed_request_priority(honed_request *request, int priority);
/* 1 refuses inputs that hold NaN or infinity with INVALID_ARGUMENT; 0 (usual) does not look. */
HONED_API void honed_request_finite(honed_request *request, int finite);
/*
 * Makes the calls that follow part of a sequence, for which the service keeps the model's state; id 0 of none. `flags`:
 * HONED_SEQUENCE_START begins it with the next call, HONED_SEQUENCE_END ends it; after a call that succeeded they are 0.
 * With HONED_SEQUENCE_LAST_TOKEN a decoder answers for the last token of each call alone.
 */
HONED_API void honed_request_sequence(honed_request *request, uint64_t id, unsigned flags);

/* Makes the call and waits for its answer. Any code but those of honed_list. */
HONED_API HONED_MUST_CHECK honed_code honed_infer(honed_request *request);
/*
 * The same, and tries again for `patience` ms while the code is one that passes (honed_code_passes); an attempt that is under
 * way then is not cut short. A request in a sequence is not repeated after HONED_DISCONNECTED, since it may have run.
 */
HONED_API HONED_MUST_CHECK honed_code honed_infer_patiently(honed_request *request, int patience);

/* Outputs of the last call, in the order asked for; none unless it succeeded. They live until the next call. */
HONED_API size_t honed_request_output_count(const honed_request *request);
/* NULL beyond the last. */
HONED_API const honed_tensor *honed_request_output(const honed_request *request, size_t index);
/* NULL where there is none of that name. */
HONED_API const honed_tensor *honed_request_output_named(const honed_request *request, const char *name);
/* The result of the last call; HONED_OK before the first and while one is on its way. */
HONED_API honed_code honed_request_code(const honed_request *request);
/* Why the last call, or the last function that took this request, failed; "" where it did not. */
HONED_API const char *honed_request_error(const honed_request *request);
/* How long the last call waited in the service, and was computed, in microseconds; and what answered: "gpu", "cpu", "gpu+cpu". */
HONED_API uint64_t honed_request_queue_us(const honed_request *request);
HONED_API uint64_t honed_request_compute_us(const honed_request *request);
HONED_API const char *honed_request_engine(const honed_request *request);

/* ---- Several requests at once, and event loops ---- */

/*
 * Makes the call and returns; honed_collect gives the request back when it is answered. Until then it must not be changed.
 * An error is one of this call alone: the request is then not collected.
 */
HONED_API HONED_MUST_CHECK honed_code honed_submit(honed_request *request);
/*
 * The next submitted request that has ended, in whatever way: honed_request_code tells. NULL where none did within `timeout`
 * ms, or none is on its way. This, and any call that waits, is what sends and receives: there is no thread that does.
 */
HONED_API honed_request *honed_collect(honed_service *service, int timeout);
/* Gives up a submitted request; it is still collected, as HONED_CANCELLED, or with its result if it ended before. */
HONED_API void honed_request_cancel(honed_request *request);
/*
 * A descriptor that poll, epoll and the like report readable when honed_collect(service, 0) has something to do: call it
 * then until it gives NULL. It stays the same for the life of the connection, restarts of the service included. Do not read it.
 */
HONED_API int honed_service_fd(const honed_service *service);

/* ---- Shared memory ---- */

/*
 * `bytes` bytes of zeros shared with the service, for inputs and outputs that are then neither copied nor sent. It is told to
 * the service with the first request that uses it. NO_MEMORY, INVALID_ARGUMENT. Free it with honed_buffer_free; requests that
 * use it keep it until they are freed or cleared.
 * After DEADLINE_EXCEEDED, CANCELLED and DISCONNECTED the service may use the places of that request for a moment longer.
 */
HONED_API HONED_MUST_CHECK honed_code honed_buffer_new(honed_service *service, size_t bytes, honed_buffer **made);
HONED_API void honed_buffer_free(honed_buffer *buffer);
/* Where it begins, aligned to a page. */
HONED_API void *honed_buffer_data(const honed_buffer *buffer);
HONED_API size_t honed_buffer_bytes(const honed_buffer *buffer);

#ifdef __cplusplus
}
#endif

#endif
