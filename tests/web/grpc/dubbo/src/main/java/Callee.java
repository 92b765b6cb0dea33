import io.tickwheel.v1.CallRequest;
import io.tickwheel.v1.CallResponse;
import io.tickwheel.v1.CallbackService;
import io.tickwheel.v1.DubboCallbackServiceTriple;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.util.Base64;
import javax.crypto.Mac;
import javax.crypto.spec.SecretKeySpec;
import org.apache.dubbo.config.ApplicationConfig;
import org.apache.dubbo.config.ProtocolConfig;
import org.apache.dubbo.config.RegistryConfig;
import org.apache.dubbo.config.ServiceConfig;
import org.apache.dubbo.config.bootstrap.DubboBootstrap;
import org.apache.dubbo.rpc.RpcContext;
import org.apache.dubbo.rpc.TriRpcStatus;

/** Serves CallbackService with Dubbo: verifies each call, refuses the first, finishes the next. */
public class Callee extends DubboCallbackServiceTriple.CallbackServiceImplBase {
  private final byte[] key;

  Callee(String secret) {
    key = Base64.getDecoder().decode(secret.substring("whsec_".length()));
  }

  @Override
  public CallResponse call(CallRequest request) {
    boolean verified = verified(request.getPayload());
    System.out.println(request.getAttempt() + " " + verified + " " + request.getPayload());
    if (request.getAttempt() == 1) {
      throw TriRpcStatus.fromCode(TriRpcStatus.Code.FAILED_PRECONDITION)
          .withDescription("not yet")
          .asException();
    }
    return CallResponse.newBuilder().setResult("{\"by\": \"dubbo\"}").build();
  }

  /** Returns whether the call is signed with the secret, by Standard Webhooks. */
  private boolean verified(String payload) {
    try {
      Mac mac = Mac.getInstance("HmacSHA256");
      mac.init(new SecretKeySpec(key, "HmacSHA256"));
      String signed = header("webhook-id") + "." + header("webhook-timestamp") + "." + payload;
      byte[] right = mac.doFinal(signed.getBytes(StandardCharsets.UTF_8));
      String given = header("webhook-signature").substring("v1,".length());
      return MessageDigest.isEqual(right, Base64.getDecoder().decode(given));
    } catch (java.security.GeneralSecurityException error) {
      throw new IllegalStateException(error);
    }
  }

  private static String header(String name) {
    return RpcContext.getServerAttachment().getAttachment(name);
  }

  public static void main(String[] arguments) throws Exception {
    ServiceConfig<CallbackService> service = new ServiceConfig<>();
    service.setInterface(CallbackService.class);
    service.setRef(new Callee(arguments[1]));
    ProtocolConfig protocol = new ProtocolConfig("tri", Integer.parseInt(arguments[0]));
    protocol.setHost("127.0.0.1");
    DubboBootstrap.getInstance()
        .application(new ApplicationConfig("tickwheel-test-callee"))
        .registry(new RegistryConfig(RegistryConfig.NO_AVAILABLE))
        .protocol(protocol)
        .service(service)
        .start();
    System.out.println("ready");
    Thread.currentThread().join();
  }
}
