/*
 * libhoned: run models of honed from C.
 *
 * honed is a service that runs ONNX models on the machine's GPU or processor. This library connects to its socket, lists
 * and describes models, and has the service run them: one request at a time or several, with tensors that are copied or
 * lie in memory shared with the service.
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
 * Rules for all functions:
 *
 * - A function returns its result, or a honed_code; honed_service_error and honed_request_error then say in one sentence what
 *   is wrong and what to do. Text is UTF-8.
 * - A honed_service and everything made with it belong to one thread at a time. Threads that work at the same time have one
 *   each. The library starts no thread, sets no signal handler, and writes nothing to standard output or error.
 * - The library connects when it needs to, and again after the service restarts. Requests that ran then end with
 *   HONED_DISCONNECTED or HONED_UNAVAILABLE, and may be sent again; honed_infer_patiently does so.
 * - Tensors are dense, row-major and little-endian.
 * - Times are milliseconds, as in poll: 0 does not wait, -1 sets no limit.
 * - Objects may be freed in any order, and freeing NULL does nothing.
 *
 * Link with `pkg-config --cflags --libs honed`. Later versions add functions and codes but change none within libhoned.so.0.
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

/* A connection to the service, which is made again after the service restarts. */
typedef struct honed_service honed_service;
/* A model's name, inputs and outputs. */
typedef struct honed_model honed_model;
/* A list of models. */
typedef struct honed_models honed_models;
/* An input or output: name, type and shape; an output of a request also has data. */
typedef struct honed_tensor honed_tensor;
/* A request of a model, which may be sent any number of times, and the outputs of its last answer. */
typedef struct honed_request honed_request;
/* Memory shared with the service. */
typedef struct honed_buffer honed_buffer;

/* The result of a call. The service returns those from 1 to 19. Later versions may add codes. */
typedef enum honed_code {
    HONED_OK = 0,
    HONED_INVALID_ARGUMENT = 1,    /* a mistake in the program: names, types, shapes, or a function used wrongly */
    HONED_FAILED_PRECONDITION = 2, /* the model cannot do this */
    HONED_NOT_FOUND = 3,           /* there is no such model */
    HONED_ALREADY_EXISTS = 4,
    HONED_PERMISSION_DENIED = 5,   /* this user is not in group honed */
    HONED_DEADLINE_EXCEEDED = 6,   /* the answer was late: drop this frame, or allow more time */
    HONED_CANCELLED = 7,           /* honed_request_cancel, or honed_service_free while it ran */
    HONED_RESOURCE_EXHAUSTED = 8,  /* the queue, or memory of the service, is full: slow down, then try again */
    HONED_UNIMPLEMENTED = 9,       /* the service is older than this library */
    HONED_UNAVAILABLE = 10,        /* no service, or one that cannot answer now; the request has not run: try again */
    HONED_INTERNAL = 11,           /* a mistake in honed, or an answer that makes no sense: compare versions */
    HONED_SEQUENCE_LOST = 12,      /* the service no longer knows the sequence: begin it again */
    HONED_DISCONNECTED = 20,       /* the service went away before it answered; the request may have run: try again */
    HONED_NO_MEMORY = 21           /* this process has no memory left */
} honed_code;

/* Types of elements, as the protocol names them. */
typedef enum honed_type {
    HONED_UNKNOWN = 0, /* a type that this version of the library does not know */
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

/* Returns the version of the library, such as "0.2.0". */
HONED_API const char *honed_version(void);
/* Returns a code as the protocol writes it, such as "NOT_FOUND". */
HONED_API const char *honed_code_name(honed_code code);
/* Returns 1 if the same call may succeed later (UNAVAILABLE, DISCONNECTED, RESOURCE_EXHAUSTED), else 0. */
HONED_API int honed_code_passes(honed_code code);
/* Returns a type as the protocol writes it, such as "FP32"; "" for HONED_UNKNOWN. */
HONED_API const char *honed_type_name(honed_type type);
/* Returns the bytes of one element; 0 for HONED_UNKNOWN. */
HONED_API size_t honed_type_bytes(honed_type type);

/* ---- The connection ---- */

/*
 * Returns a connection that the first call opens; NULL if memory or descriptors are short. `path` is the path of the
 * socket. With NULL it is $HONED_SOCKET if set, else /run/honed/honed.sock if that exists, else
 * $XDG_RUNTIME_DIR/honed/honed.sock.
 */
HONED_API honed_service *honed_service_new(const char *path);
/* Ends the connection. Running requests end with HONED_CANCELLED; its objects can then only be freed. */
HONED_API void honed_service_free(honed_service *service);
/*
 * Connects now, and tries again for `timeout` ms while no service answers. The first request connects, too; this reports
 * errors early. Returns UNAVAILABLE or PERMISSION_DENIED on failure.
 */
HONED_API HONED_MUST_CHECK honed_code honed_service_connect(honed_service *service, int timeout);
/* Sets the time limit of calls without one of their own, in ms; 60,000 by default. The service's own limit is a day. */
HONED_API void honed_service_timeout(honed_service *service, int timeout);
/* Returns why the last call with this connection, and without a request, failed; "" if it succeeded. */
HONED_API const char *honed_service_error(const honed_service *service);

/* ---- Models ---- */

/* Describes `model` in `*found`, which is NULL on failure (NOT_FOUND). Free it with honed_model_free. */
HONED_API HONED_MUST_CHECK honed_code honed_describe(honed_service *service, const char *model, honed_model **found);
HONED_API void honed_model_free(honed_model *model);
HONED_API const char *honed_model_name(const honed_model *model);
HONED_API size_t honed_model_input_count(const honed_model *model);
HONED_API size_t honed_model_output_count(const honed_model *model);
/* Returns the input or output at `index`, NULL beyond the last. It lives as long as the model. */
HONED_API const honed_tensor *honed_model_input(const honed_model *model, size_t index);
HONED_API const honed_tensor *honed_model_output(const honed_model *model, size_t index);

/* Sets `*ready` to 1 if `model` answers requests now, else to 0. Returns NOT_FOUND for an unknown model. */
HONED_API HONED_MUST_CHECK honed_code honed_ready(honed_service *service, const char *model, int *ready);

/* Lists all models in `*found`, which is NULL on failure. Free it with honed_models_free. */
HONED_API HONED_MUST_CHECK honed_code honed_list(honed_service *service, honed_models **found);
HONED_API void honed_models_free(honed_models *models);
HONED_API size_t honed_models_count(const honed_models *models);
/* Returns the name of the model at `index`; like the next three, "" beyond the last. */
HONED_API const char *honed_models_name(const honed_models *models, size_t index);
/* Returns "READY", "LOADING" or "UNAVAILABLE". */
HONED_API const char *honed_models_state(const honed_models *models, size_t index);
/* Returns why a model is in its state, or "". */
HONED_API const char *honed_models_reason(const honed_models *models, size_t index);
/* Returns "gpu", "cpu" or "gpu+cpu". */
HONED_API const char *honed_models_engine(const honed_models *models, size_t index);

/*
 * Has the service run the ONNX file at `path`, with its external data, for this user alone. `*found` describes the model, as
 * by honed_describe, with its name for requests. Call this each time the program starts: the service copies a file only
 * once, and may remove one that is not used for long. The first call takes as long as ONNX Runtime needs to load the file.
 * `precision` is "auto", or "fp32" to forbid fp16. Returns FAILED_PRECONDITION if the file cannot be read or served,
 * RESOURCE_EXHAUSTED if the user's quota is full, PERMISSION_DENIED if the service accepts no models.
 */
HONED_API HONED_MUST_CHECK honed_code honed_bring(honed_service *service, const char *path, const char *precision,
                                                  honed_model **found);

/* ---- Tensors ---- */

HONED_API const char *honed_tensor_name(const honed_tensor *tensor);
HONED_API honed_type honed_tensor_type(const honed_tensor *tensor);
/* Returns the number of dimensions; 0 for a scalar. */
HONED_API size_t honed_tensor_rank(const honed_tensor *tensor);
/* Returns the sizes of all dimensions. In tensors of a model, -1 is an open size: any will do. */
HONED_API const int64_t *honed_tensor_shape(const honed_tensor *tensor);
/* Returns the bytes of all elements; -1 for a tensor of a model with an open size or an unknown type. */
HONED_API int64_t honed_tensor_bytes(const honed_tensor *tensor);
/*
 * Returns the elements of a request's output, aligned to 64 bytes or where they lie in a honed_buffer; NULL for tensors of a
 * model. They stay until the request is sent again or freed.
 */
HONED_API const void *honed_tensor_data(const honed_tensor *tensor);

/* ---- Requests ---- */

/* Returns a request of `model` without inputs; NULL if memory is short. */
HONED_API honed_request *honed_request_new(honed_service *service, const char *model);
/* Frees a request, and cancels it if it runs. */
HONED_API void honed_request_free(honed_request *request);

/*
 * Sets the input `name` for all calls that follow, or returns INVALID_ARGUMENT or NO_MEMORY. `data` is not copied:
 * honed_infer and honed_submit read it, so it must stay valid. For the next frame, write to the same place and call again.
 */
HONED_API HONED_MUST_CHECK honed_code honed_request_input(honed_request *request, const char *name, honed_type type,
                                                          const int64_t *shape, size_t rank, const void *data);
/* Sets an input as honed_request_input does, with the type and shape of `tensor`, which must have no open size. */
HONED_API HONED_MUST_CHECK honed_code honed_request_input_like(honed_request *request, const honed_tensor *tensor,
                                                               const void *data);
/* Sets an input that lies in `buffer`, from `offset` on. The service reads it while the request runs: change it afterwards. */
HONED_API HONED_MUST_CHECK honed_code honed_request_input_shared(honed_request *request, const char *name, honed_type type,
                                                                 const int64_t *shape, size_t rank, honed_buffer *buffer,
                                                                 size_t offset);
/* Asks for an output. A request returns the outputs that it asked for, in that order, or all if it asked for none. */
HONED_API HONED_MUST_CHECK honed_code honed_request_want(honed_request *request, const char *name);
/* Asks for an output that the service writes to `buffer`, from `offset` on. `bytes` must be exactly its size. */
HONED_API HONED_MUST_CHECK honed_code honed_request_want_shared(honed_request *request, const char *name,
                                                                honed_buffer *buffer, size_t offset, size_t bytes);
/* Forgets inputs, requested outputs, the sequence, and the outputs of the last call. A running call is not changed. */
HONED_API void honed_request_clear(honed_request *request);

/* Sets the time from the call within which the answer is of use, in ms; -1: as for the connection. */
HONED_API void honed_request_timeout(honed_request *request, int timeout);
/* Sets the order among requests of one user: 1 first, 2 (default), 3 last. */
HONED_API void honed_request_priority(honed_request *request, int priority);
/* With 1, refuses inputs that hold NaN or infinity (INVALID_ARGUMENT); 0 is the default. */
HONED_API void honed_request_finite(honed_request *request, int finite);
/*
 * Makes the calls that follow part of a sequence, for which the service keeps the model's state; id 0 is no sequence. In
 * `flags`, HONED_SEQUENCE_START begins it with the next call and HONED_SEQUENCE_END ends it; a successful call clears both.
 * With HONED_SEQUENCE_LAST_TOKEN a decoder answers for the last token of each call alone.
 */
HONED_API void honed_request_sequence(honed_request *request, uint64_t id, unsigned flags);

/* Sends the request and waits for its answer. */
HONED_API HONED_MUST_CHECK honed_code honed_infer(honed_request *request);
/*
 * Calls honed_infer, and again for `patience` ms while the code is one that passes (honed_code_passes); the last attempt is
 * not cut short. A request in a sequence is not repeated after HONED_DISCONNECTED, since it may have run.
 */
HONED_API HONED_MUST_CHECK honed_code honed_infer_patiently(honed_request *request, int patience);

/* Returns the number of outputs of the last call; 0 unless it succeeded. They live until the next call. */
HONED_API size_t honed_request_output_count(const honed_request *request);
/* Returns the output at `index`, in the order asked for; NULL beyond the last. */
HONED_API const honed_tensor *honed_request_output(const honed_request *request, size_t index);
/* Returns the output of this name, NULL if there is none. */
HONED_API const honed_tensor *honed_request_output_named(const honed_request *request, const char *name);
/* Returns the result of the last call; HONED_OK before the first, and while one runs. */
HONED_API honed_code honed_request_code(const honed_request *request);
/* Returns why the last call, or the last function with this request, failed; "" if it succeeded. */
HONED_API const char *honed_request_error(const honed_request *request);
/* Returns how long the last call waited in the service, in microseconds. */
HONED_API uint64_t honed_request_queue_us(const honed_request *request);
/* Returns how long the last call was computed, in microseconds. */
HONED_API uint64_t honed_request_compute_us(const honed_request *request);
/* Returns what answered the last call: "gpu", "cpu" or "gpu+cpu". */
HONED_API const char *honed_request_engine(const honed_request *request);

/* ---- Several requests at once, and event loops ---- */

/*
 * Sends the request and returns; honed_collect returns it when it is answered. Do not change it until then. After an error
 * of this call, the request is not collected.
 */
HONED_API HONED_MUST_CHECK honed_code honed_submit(honed_request *request);
/*
 * Returns a submitted request that has ended, well or not (honed_request_code); NULL if none ended within `timeout` ms, or
 * none runs. Only this call, and others that wait, send and receive: there is no thread for that.
 */
HONED_API honed_request *honed_collect(honed_service *service, int timeout);
/* Cancels a submitted request. It is still collected: as HONED_CANCELLED, or with its result if it had ended. */
HONED_API void honed_request_cancel(honed_request *request);
/*
 * Returns a descriptor for poll or epoll that is readable when there is something to collect: then call
 * honed_collect(service, 0) until it returns NULL. It stays the same while the service restarts. Do not read from it.
 */
HONED_API int honed_service_fd(const honed_service *service);

/* ---- Shared memory ---- */

/*
 * Makes a buffer of `bytes` zeros that is shared with the service: inputs and outputs in it are neither copied nor sent.
 * Returns NO_MEMORY or INVALID_ARGUMENT on failure. Free it with honed_buffer_free; requests that use it keep it until they
 * are freed or cleared. After DEADLINE_EXCEEDED, CANCELLED and DISCONNECTED the service may still use it for a moment.
 */
HONED_API HONED_MUST_CHECK honed_code honed_buffer_new(honed_service *service, size_t bytes, honed_buffer **made);
HONED_API void honed_buffer_free(honed_buffer *buffer);
/* Returns where the buffer begins, aligned to a page. */
HONED_API void *honed_buffer_data(const honed_buffer *buffer);
HONED_API size_t honed_buffer_bytes(const honed_buffer *buffer);

#ifdef __cplusplus
}
#endif

#endif
