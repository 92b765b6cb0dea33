import io.tickwheel.v1.CancelRequest;
import io.tickwheel.v1.FeedbackRequest;
import io.tickwheel.v1.GetRequest;
import io.tickwheel.v1.Outcome;
import io.tickwheel.v1.State;
import io.tickwheel.v1.SubmitRequest;
import io.tickwheel.v1.SubmitResponse;
import io.tickwheel.v1.Task;
import io.tickwheel.v1.TaskService;
import io.tickwheel.v1.WatchRequest;
import io.tickwheel.v1.WatchResponse;
import java.util.concurrent.CompletableFuture;
import org.apache.dubbo.common.stream.StreamObserver;
import org.apache.dubbo.config.ApplicationConfig;
import org.apache.dubbo.config.ReferenceConfig;
import org.apache.dubbo.config.bootstrap.DubboBootstrap;
import org.apache.dubbo.rpc.RpcContext;
import org.apache.dubbo.rpc.RpcException;
import org.apache.dubbo.rpc.StatusRpcException;
import org.apache.dubbo.rpc.TriRpcStatus;

/** Uses the API as a Dubbo client does: the address of the server and a token; prints the answers. */
public class Client {
  private final TaskService tasks;
  private final String token;

  Client(String address, String token) {
    ReferenceConfig<TaskService> reference = new ReferenceConfig<>();
    reference.setInterface(TaskService.class);
    reference.setUrl("tri://" + address);
    reference.setTimeout(60_000);
    reference.setRetries(0);
    DubboBootstrap.getInstance()
        .application(new ApplicationConfig("tickwheel-test-client"))
        .reference(reference)
        .start();
    this.tasks = reference.get();
    this.token = token;
  }

  /** Sets the metadata of the next call: Dubbo forgets them after it. */
  private void metadata(String idempotencyKey) {
    RpcContext.getClientAttachment().setAttachment("authorization", "Bearer " + token);
    if (idempotencyKey != null) {
      RpcContext.getClientAttachment().setAttachment("idempotency-key", idempotencyKey);
    }
  }

  private SubmitResponse submit(SubmitRequest request, String idempotencyKey) {
    metadata(idempotencyKey);
    return tasks.submit(request);
  }

  /** Watches a task until it has ended, and reports its end when it is first seen running. */
  private Task watch(String id) throws Exception {
    CompletableFuture<Integer> running = new CompletableFuture<>();
    CompletableFuture<Task> ended = new CompletableFuture<>();
    metadata(null);
    tasks.watch(
        WatchRequest.newBuilder().setId(id).build(),
        new StreamObserver<WatchResponse>() {
          private Task last;

          @Override
          public void onNext(WatchResponse change) {
            last = change.getTask();
            if (last.getState() == State.STATE_RUNNING) {
              running.complete(last.getAttempt());
            }
          }

          @Override
          public void onError(Throwable error) {
            running.completeExceptionally(error);
            ended.completeExceptionally(error);
          }

          @Override
          public void onCompleted() {
            ended.complete(last);
          }
        });
    FeedbackRequest.Builder feedback =
        FeedbackRequest.newBuilder().setId(id).setAttempt(running.get());
    metadata(null);
    boolean won =
        tasks.feedback(feedback.setOutcome(Outcome.OUTCOME_FINISHED).setResult("7").build()).getWon();
    System.out.println("feedback " + won);
    return ended.get();
  }

  private void run() throws Exception {
    SubmitRequest request =
        SubmitRequest.newBuilder().setService("later").setPayload("{\"id\": 1}").build();
    Task task = submit(request, "once").getTask();
    SubmitResponse repeated = submit(request, "once");
    System.out.println(
        "repeated " + repeated.getRepeatedRequest()
            + " " + repeated.getTask().getId().equals(task.getId()));
    System.out.println("watch " + watch(task.getId()).getState());
    metadata(null);
    System.out.println(
        "get " + tasks.get(GetRequest.newBuilder().setId(task.getId()).build()).getTask().getResult());

    SubmitRequest.Builder later = request.toBuilder();
    later.getDelayBuilder().setSeconds(3600);
    String id = submit(later.build(), null).getTask().getId();
    metadata(null);
    System.out.println(
        "cancel " + tasks.cancel(CancelRequest.newBuilder().setId(id).build()).getState());
    try {
      submit(request.toBuilder().setService("none").build(), null);
    } catch (RpcException error) {
      System.out.println("error " + statusOf(error).code + ": " + statusOf(error).description);
    }
  }

  /** Finds the status of a call: Dubbo wraps it. */
  private static TriRpcStatus statusOf(Throwable error) {
    while (!(error instanceof StatusRpcException)) {
      error = error.getCause();
    }
    return ((StatusRpcException) error).getStatus();
  }

  public static void main(String[] arguments) throws Exception {
    new Client(arguments[0], arguments[1]).run();
    System.exit(0);
  }
}
