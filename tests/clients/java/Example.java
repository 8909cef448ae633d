import java.util.Set;
import java.util.concurrent.Callable;
import redlock.ApiClient;
import redlock.ApiException;
import redlock.ApiResponse;
import redlock.api.LocksApi;
import redlock.model.AcquireBody;
import redlock.model.DeferBody;
import redlock.model.ExtendBody;
import redlock.model.Lease;
import redlock.model.LockStatus;
import redlock.model.Problem;
import redlock.model.RequestStatus;

/** A session with a gateway, through the generated client. To run it: java Example URL. */
public class Example {
  static final String NAME = "reports/nightly";

  private final ApiClient client = new ApiClient();
  private final LocksApi locks;

  Example(String url) {
    client.updateBaseUri(url);
    locks = new LocksApi(client); // It copies the client's settings now, so later changes do not reach it.
  }

  void session() throws Exception {
    AcquireBody body = new AcquireBody().ttlMs(30_000).owner("Zoë on host-7");
    ApiResponse<Lease> granted = locks.acquireLockWithHttpInfo(NAME, null, null, body);
    Lease lease = granted.getData();
    expect(201, granted.getStatusCode());
    expect(NAME, lease.getName());
    expect(lease.getToken(), granted.getHeaders().get("lock-token").get(0));
    expect("/locks/reports%2Fnightly", granted.getHeaders().get("location").get(0));
    expect(true, lease.getValidityMs() > 0 && lease.getFencingToken() > 0);
    said("acquired " + lease.getName() + ", fencing token " + lease.getFencingToken());

    // The body is not null, because the generated code would send null as the JSON text "null".
    Problem held = refused(409, () -> locks.acquireLock(NAME, null, null, new AcquireBody()));
    expect(Problem.CodeEnum.LOCK_HELD, held.getCode());
    expect("Zoë on host-7", held.getHolder());
    expect(true, held.getRetryAfterMs() > 0 && held.getExpiresInMs() > 0);
    said("conflict: " + held.getCode() + " by " + held.getHolder());

    LockStatus status = locks.getLock(NAME, null);
    expect("held", status.getState().getValue());
    expect(lease.getFencingToken(), status.getFencingToken());
    said("looked: " + status.getState());

    Lease longer = locks.extendLock(NAME, lease.getToken(), new ExtendBody().ttlMs(60_000));
    expect(60_000, longer.getTtlMs());
    expect(lease.getFencingToken(), longer.getFencingToken());
    said("extended to " + longer.getTtlMs() + " ms");

    expect(204, locks.releaseLockWithHttpInfo(NAME, lease.getToken(), null, null, null, null, null).getStatusCode());
    said("released");

    Problem gone = refused(404, () -> locks.releaseLockWithHttpInfo(NAME, lease.getToken(), null, null, null, null, null));
    expect(Problem.CodeEnum.LOCK_NOT_FOUND, gone.getCode());
    said("released again: " + gone.getCode());

    String key = "java-request-number-1";
    ApiResponse<RequestStatus> accepted =
        locks.createRequestWithHttpInfo(key, new DeferBody().names(Set.of(NAME)), null);
    RequestStatus request = accepted.getData();
    expect(202, accepted.getStatusCode());
    expect("/requests/" + request.getId(), accepted.getHeaders().get("location").get(0));
    expect("ready", request.getState());
    expect("ready", locks.getRequest(request.getId()).getState());
    said("request " + request.getState() + " for " + request.getNames());

    Lease claimed = locks.acquireLock(NAME, key, null, new AcquireBody().ttlMs(30_000));
    expect("claimed", locks.getRequest(request.getId()).getState());
    locks.releaseLock(NAME, claimed.getToken(), null, null, null, null, null);
    said("claimed and released " + claimed.getName());
  }

  /** The problem in the answer to a call that the gateway refuses. */
  Problem refused(int status, Callable<?> call) throws Exception {
    try {
      call.call();
    } catch (ApiException refusal) {
      if (refusal.getCode() == 0) throw refusal; // There was no answer. The cause is an IOException.
      expect(status, refusal.getCode());
      expect("application/problem+json", refusal.getResponseHeaders().firstValue("content-type").orElse(""));
      return client.getObjectMapper().readValue(refusal.getResponseBody(), Problem.class);
    }
    throw new AssertionError("this call should have been refused with " + status);
  }

  static void expect(Object wanted, Object found) {
    if (!wanted.equals(found)) throw new AssertionError("wanted " + wanted + ", found " + found);
  }

  static void said(String line) {
    System.out.println("java: " + line);
  }

  public static void main(String[] arguments) throws Exception {
    new Example(arguments[0]).session();
  }
}
