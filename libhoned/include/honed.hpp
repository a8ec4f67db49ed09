/*
 * honed.h for C++17: what is made is freed by itself, and what fails throws honed::error. Everything that honed.h says holds.
 *
 *     honed::service service;
 *     honed::request request(service, "squeezenet");
 *     request.input("image", {1, 3, 224, 224}, pixels);   // std::vector<float> or a pointer to one
 *     request.infer();
 *     for (float score : request.output("scores").values<float>())
 *         ...
 */
#ifndef HONED_HPP
#define HONED_HPP

#include <honed.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace honed {

/* What failed: a sentence, and a code to act by. */
class error : public std::runtime_error {
public:
    error(honed_code code, const char *text) : std::runtime_error(text), code_(code) {}
    honed_code code() const noexcept { return code_; }
    /* Whether the same call may succeed later. */
    bool passes() const noexcept { return honed_code_passes(code_) != 0; }

private:
    honed_code code_;
};

namespace detail {
inline void check(honed_code code, const char *text)
{
    if (code != HONED_OK)
        throw error(code, text);
}

template <auto Free> struct freeing {
    template <class T> void operator()(T *freed) const noexcept { Free(freed); }
};

template <class T, auto Free> using owned = std::unique_ptr<T, freeing<Free>>;

template <class T, auto Free> owned<T, Free> made(T *given)
{
    if (!given)
        throw error(HONED_NO_MEMORY, "this process has no memory left for it; free something and try again");
    return owned<T, Free>(given);
}
} // namespace detail

/* The type of elements of C++, for those that are the same in both; FP16 has none, use the functions that take a type. */
template <class T> constexpr honed_type type_of() = delete;
template <> constexpr honed_type type_of<bool>() { return HONED_BOOL; }
template <> constexpr honed_type type_of<std::uint8_t>() { return HONED_UINT8; }
template <> constexpr honed_type type_of<std::int8_t>() { return HONED_INT8; }
template <> constexpr honed_type type_of<std::uint16_t>() { return HONED_UINT16; }
template <> constexpr honed_type type_of<std::int16_t>() { return HONED_INT16; }
template <> constexpr honed_type type_of<std::uint32_t>() { return HONED_UINT32; }
template <> constexpr honed_type type_of<std::int32_t>() { return HONED_INT32; }
template <> constexpr honed_type type_of<std::uint64_t>() { return HONED_UINT64; }
template <> constexpr honed_type type_of<std::int64_t>() { return HONED_INT64; }
template <> constexpr honed_type type_of<float>() { return HONED_FP32; }
template <> constexpr honed_type type_of<double>() { return HONED_FP64; }

/* Elements that belong to somebody else. */
template <class T> class view {
public:
    view(T *data, std::size_t size) : data_(data), size_(size) {}
    T *data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }
    T *begin() const noexcept { return data_; }
    T *end() const noexcept { return data_ + size_; }
    T &operator[](std::size_t index) const { return data_[index]; }

private:
    T *data_;
    std::size_t size_;
};

/* An input or output. One of a model keeps that; one of a request lives as long as that has its outputs. */
class tensor {
public:
    explicit tensor(const honed_tensor *given, std::shared_ptr<honed_model> of = nullptr) : c_(given), of_(std::move(of)) {}
    std::string name() const { return honed_tensor_name(c_); }
    honed_type type() const noexcept { return honed_tensor_type(c_); }
    std::vector<std::int64_t> shape() const
    {
        const std::int64_t *sizes = honed_tensor_shape(c_);
        return {sizes, sizes + honed_tensor_rank(c_)};
    }
    /* -1 where a size is open. */
    std::int64_t bytes() const noexcept { return honed_tensor_bytes(c_); }
    const void *data() const noexcept { return honed_tensor_data(c_); }
    /* The elements of an output; throws where it has elements of another type. */
    template <class T> view<const T> values() const
    {
        if (type() != type_of<T>())
            throw error(HONED_INVALID_ARGUMENT, (name() + " is " + honed_type_name(type())).c_str());
        return {static_cast<const T *>(data()), static_cast<std::size_t>(bytes()) / sizeof(T)};
    }
    const honed_tensor *c() const noexcept { return c_; }

private:
    const honed_tensor *c_;
    std::shared_ptr<honed_model> of_;
};

/* What a model takes and gives. */
class model {
public:
    explicit model(honed_model *given) : c_(given, honed_model_free) {}
    std::string name() const { return honed_model_name(c_.get()); }
    std::vector<tensor> inputs() const { return all(honed_model_input_count, honed_model_input); }
    std::vector<tensor> outputs() const { return all(honed_model_output_count, honed_model_output); }

private:
    template <class Count, class At> std::vector<tensor> all(Count count, At at) const
    {
        std::vector<tensor> found;
        for (std::size_t i = 0; i < count(c_.get()); i++)
            found.emplace_back(at(c_.get(), i), c_);
        return found;
    }

    std::shared_ptr<honed_model> c_;
};

/* One row of the list of models. */
struct listed {
    std::string name, state, reason, engine;
};

/* A connection to the service. */
class service {
public:
    service() : c_(detail::made<honed_service, honed_service_free>(honed_service_new(nullptr))) {}
    explicit service(const std::string &path) : c_(detail::made<honed_service, honed_service_free>(honed_service_new(path.c_str()))) {}
    void connect(int timeout) { check(honed_service_connect(c(), timeout)); }
    void set_timeout(int timeout) { honed_service_timeout(c(), timeout); }
    model describe(const std::string &name)
    {
        honed_model *found;
        check(honed_describe(c(), name.c_str(), &found));
        return model(found);
    }
    model bring(const std::string &path, const std::string &precision = "auto")
    {
        honed_model *found;
        check(honed_bring(c(), path.c_str(), precision.c_str(), &found));
        return model(found);
    }
    bool ready(const std::string &name)
    {
        int is = 0;
        check(honed_ready(c(), name.c_str(), &is));
        return is != 0;
    }
    std::vector<listed> models()
    {
        honed_models *given;
        check(honed_list(c(), &given));
        detail::owned<honed_models, honed_models_free> kept(given);
        std::vector<listed> rows;
        for (std::size_t i = 0; i < honed_models_count(given); i++)
            rows.push_back({honed_models_name(given, i), honed_models_state(given, i), honed_models_reason(given, i),
                            honed_models_engine(given, i)});
        return rows;
    }
    /* The request that ended, to be compared with those submitted (request::c); nullptr where none did in time. */
    honed_request *collect(int timeout) { return honed_collect(c(), timeout); }
    int fd() const noexcept { return honed_service_fd(c()); }
    honed_service *c() const noexcept { return c_.get(); }

private:
    void check(honed_code code) const { detail::check(code, honed_service_error(c())); }

    detail::owned<honed_service, honed_service_free> c_;
};

/* Memory shared with the service. */
class buffer {
public:
    buffer(service &with, std::size_t bytes)
    {
        honed_buffer *given;
        detail::check(honed_buffer_new(with.c(), bytes, &given), honed_service_error(with.c()));
        c_.reset(given);
    }
    void *data() const noexcept { return honed_buffer_data(c()); }
    std::size_t bytes() const noexcept { return honed_buffer_bytes(c()); }
    /* As elements, from `offset` bytes on. */
    template <class T> view<T> values(std::size_t offset = 0) const
    {
        if (offset % alignof(T) || offset > bytes())
            throw error(HONED_INVALID_ARGUMENT, "no elements of this type can begin there");
        return {reinterpret_cast<T *>(static_cast<char *>(data()) + offset), (bytes() - offset) / sizeof(T)};
    }
    honed_buffer *c() const noexcept { return c_.get(); }

private:
    detail::owned<honed_buffer, honed_buffer_free> c_;
};

/* A call of a model, which may be made any number of times. */
class request {
public:
    request(const service &with, const std::string &model)
        : c_(detail::made<honed_request, honed_request_free>(honed_request_new(with.c(), model.c_str())))
    {
    }
    /* `data` is read when the call is made, each time. */
    request &input(const std::string &name, honed_type type, const std::vector<std::int64_t> &shape, const void *data)
    {
        return checked(honed_request_input(c(), name.c_str(), type, shape.data(), shape.size(), data));
    }
    template <class T> request &input(const std::string &name, const std::vector<std::int64_t> &shape, const T *data)
    {
        return input(name, type_of<T>(), shape, data);
    }
    template <class T>
    request &input(const std::string &name, const std::vector<std::int64_t> &shape, const std::vector<T> &data)
    {
        std::size_t count = 1;
        for (std::int64_t size : shape)
            count *= static_cast<std::size_t>(size);
        if (count != data.size())
            throw error(HONED_INVALID_ARGUMENT, (name + " has another number of elements than its shape").c_str());
        return input(name, type_of<T>(), shape, data.data());
    }
    request &input(const tensor &like, const void *data) { return checked(honed_request_input_like(c(), like.c(), data)); }
    request &input(const std::string &name, honed_type type, const std::vector<std::int64_t> &shape, const buffer &from,
                   std::size_t offset = 0)
    {
        return checked(honed_request_input_shared(c(), name.c_str(), type, shape.data(), shape.size(), from.c(), offset));
    }
    request &want(const std::string &name) { return checked(honed_request_want(c(), name.c_str())); }
    request &want(const std::string &name, const buffer &into, std::size_t offset, std::size_t bytes)
    {
        return checked(honed_request_want_shared(c(), name.c_str(), into.c(), offset, bytes));
    }
    request &clear() { return honed_request_clear(c()), *this; }
    request &timeout(int milliseconds) { return honed_request_timeout(c(), milliseconds), *this; }
    request &priority(int priority) { return honed_request_priority(c(), priority), *this; }
    request &finite(bool finite) { return honed_request_finite(c(), finite), *this; }
    request &sequence(std::uint64_t id, unsigned flags) { return honed_request_sequence(c(), id, flags), *this; }
    void infer() { checked(honed_infer(c())); }
    void infer_patiently(int patience) { checked(honed_infer_patiently(c(), patience)); }
    void submit() { checked(honed_submit(c())); }
    void cancel() { honed_request_cancel(c()); }
    /* Throws the error of a submitted request that was collected, unless it succeeded. */
    void check() { checked(honed_request_code(c())); }
    std::size_t output_count() const noexcept { return honed_request_output_count(c()); }
    tensor output(std::size_t index) const { return found(honed_request_output(c(), index)); }
    tensor output(const std::string &name) const { return found(honed_request_output_named(c(), name.c_str())); }
    std::string engine() const { return honed_request_engine(c()); }
    std::uint64_t queue_us() const noexcept { return honed_request_queue_us(c()); }
    std::uint64_t compute_us() const noexcept { return honed_request_compute_us(c()); }
    honed_request *c() const noexcept { return c_.get(); }

private:
    request &checked(honed_code code) { return detail::check(code, honed_request_error(c())), *this; }
    static tensor found(const honed_tensor *given)
    {
        if (!given)
            throw error(HONED_NOT_FOUND, "the last call gave no such output");
        return tensor(given);
    }

    detail::owned<honed_request, honed_request_free> c_;
};

} // namespace honed

#endif
