// The wrapper for C++, used as an app would; ends with a sentence on standard error where something is wrong.
#include <honed.hpp>

#include <cstdlib>
#include <iostream>
#include <utility>

static void must(bool good, const char *what)
{
    if (!good) {
        std::cerr << "wrapper: " << what << "\n";
        std::exit(1);
    }
}

template <class Call> static honed_code thrown(Call call)
{
    try {
        call();
    } catch (const honed::error &error) {
        must(*error.what() != 0, "an error without a sentence");
        return error.code();
    }
    return HONED_OK;
}

static void describe(honed::service &service)
{
    honed::model model = service.describe("small");
    must(model.name() == "small" && model.inputs().size() == 1, "the model is another");
    honed::tensor x = model.inputs()[0];
    must(x.name() == "x" && x.type() == HONED_FP32 && x.shape() == std::vector<std::int64_t>{8} && x.bytes() == 32, "x");
    must(model.outputs()[0].name() == "y", "y");
    for (const honed::tensor &output : service.describe("small").outputs()) // which outlive the model
        must(output.name() == "y" && output.bytes() == 32, "an output of a model that is gone");
    must(service.ready("small") && service.models()[0].state == "READY", "it is not ready");
    must(thrown([&] { service.describe("nosuch"); }) == HONED_NOT_FOUND, "a model that is not there is described");
    must(thrown([&] { service.bring("/nosuch.onnx"); }) == HONED_FAILED_PRECONDITION, "a file that is not there is brought");
}

static void infer(honed::service &service)
{
    honed::request request(service, "small");
    std::vector<float> x(8, 2.0F);
    request.input("x", {8}, x).want("y").priority(1).finite(true).timeout(60000);
    request.infer();
    honed::view<const float> y = request.output("y").values<float>();
    for (std::size_t i = 0; i < y.size(); i++)
        must(y[i] == 3.0F + static_cast<float>(i), "a wrong answer");
    must(request.engine() == "gpu" && request.compute_us() > 0 && request.output_count() == 1, "what it tells");
    must(thrown([&] { request.output(0).values<double>(); }) == HONED_INVALID_ARGUMENT, "another type");
    must(thrown([&] { request.output("z"); }) == HONED_NOT_FOUND, "an output that is not there");
    must(thrown([&] { request.input("x", {9}, x); }) == HONED_INVALID_ARGUMENT, "another size");
    request.clear().input(service.describe("small").inputs()[0], x.data()).sequence(0, 0).infer_patiently(1000);
}

static void share_and_submit(honed::service &service)
{
    honed::request request(service, "small");
    {
        honed::buffer buffer(service, 4096);
        request.input("x", HONED_FP32, {8}, buffer).want("y", buffer, 64, 32);
        for (float &value : buffer.values<float>())
            value = 1;
        must(buffer.values<float>(64).size() == 1008, "the size of a part");
    }
    honed::request moved = std::move(request); // which keeps the buffer
    moved.submit();
    must(service.collect(60000) == moved.c(), "another request is collected");
    moved.check();
    must(moved.output(0).values<float>()[7] == 9, "a wrong answer in shared memory");
    moved.submit();
    moved.cancel();
    must(service.collect(60000) == moved.c(), "it is not collected");
    must(thrown([&] { moved.check(); }) == HONED_CANCELLED, "it is not cancelled");
}

int main()
{
    honed::service service;
    service.set_timeout(60000);
    service.connect(1000);
    must(service.fd() >= 0, "no descriptor");
    describe(service);
    infer(service);
    share_and_submit(service);
    honed::service nowhere("/nonexistent");
    must(thrown([&] { nowhere.connect(0); }) == HONED_UNAVAILABLE, "a service that is not there");
    std::cout << "all is well\n";
}
